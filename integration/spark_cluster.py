"""A real Spark cluster of processes, and programs that run on it.

A master, and two workers of one core under two names of this machine, because Spark runs no
speculative twin on the host that runs the first attempt.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tests.support.python_process import python_for_spark

__all__ = ["run_on_cluster", "spark_cluster"]

_ROOT: Final = Path(__file__).parents[1]
_HOSTS: Final = ("127.0.0.1", "localhost")
_CONF: Final = {
    "spark.locality.wait": "0s",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.driver.memory": "512m",
    "spark.driver.host": _HOSTS[0],
    "spark.driver.bindAddress": _HOSTS[0],
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
    "spark.ui.enabled": "false",
}
_MASTER_AT: Final = re.compile(r"Starting Spark master at (spark://\S+)")
_START_S: Final = 60.0


@contextlib.contextmanager
def spark_cluster(folder: Path) -> Iterator[str]:
    """Run a cluster that logs into `folder`; yield the address of its master."""
    own = ("--port", "0", "--webui-port", "0")
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(
            _daemon("master.Master", "--host", _HOSTS[0], *own, folder=folder)
        )
        master = _master_of(log)
        for number, host in enumerate(_HOSTS):
            arguments = ("--host", host, *own, "--cores", "1", "--memory", "1g")
            work = ("--work-dir", str(folder / f"work-{number}"))
            stack.enter_context(
                _daemon(f"worker.Worker-{number}", *arguments, *work, master, folder=folder)
            )
        yield master


def run_on_cluster(
    master: str, module: str, *arguments: object, conf: Mapping[str, str], expect: int = 0
) -> None:
    """Run `python -m module arguments` as a driver of the cluster; it must end with `expect`."""
    submitted = [
        part for key, value in {**_CONF, **conf}.items() for part in ("--conf", f"{key}={value}")
    ]
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=_ROOT,
        env={
            **os.environ,
            # Spark gives a source's process ten seconds to start, which a loaded machine exceeds.
            "PYSPARK_PYTHON": python_for_spark(),
            "PYSPARK_SUBMIT_ARGS": " ".join(["--master", master, *submitted, "pyspark-shell"]),
        },
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == expect, (
        f"{done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    )


@contextlib.contextmanager
def _daemon(name: str, *arguments: str, folder: Path) -> Iterator[Path]:
    """Run a process of the cluster; yield where it logs."""
    import pyspark

    script = Path(pyspark.__file__).parent / "bin" / "spark-class"
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(script), f"org.apache.spark.deploy.{name.split('-')[0]}", *arguments],
            stdout=output,
            stderr=output,
            env={
                **os.environ,
                "SPARK_DAEMON_MEMORY": "256m",
                "PYSPARK_PYTHON": sys.executable,
                # What tasks run imports from here.
                "PYTHONPATH": os.pathsep.join(
                    [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
                ),
            },
        )
    try:
        yield log
    finally:
        # The executors of a worker end with it.
        process.terminate()
        process.wait(60)


def _master_of(log: Path) -> str:
    deadline = time.monotonic() + _START_S
    while (found := _MASTER_AT.search(log.read_text())) is None:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)  # sleep: the master says only in its log where it listens
    return found[1]
