"""Spark starts with the settings of spark_conf/, as its README says, and knows each of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pyspark
import pytest

from tests.support.service_process import ServiceProcess

ROOT: Final = Path(__file__).resolve().parents[1]
SPARK_CONF: Final = ROOT / "spark_conf"
# Spark's own launcher reads it before any of its modules could declare it.
UNDECLARED: Final = {"spark.master"}


def settings_of(name: str) -> dict[str, str]:
    lines = [line.strip() for line in (SPARK_CONF / name).read_text().splitlines()]
    pairs = (line.split(None, 1) for line in lines if line and not line.startswith("#"))
    return {key: value.strip() for key, value in pairs}


def submit(spark_home: Path, *options: str, keys: set[str]) -> dict[str, Any]:
    program = str(ROOT / "integration" / "spark_conf_probe.py")
    command = [str(spark_home / "bin" / "spark-submit"), *options, program, *sorted(keys)]
    environment = {
        **os.environ,
        "SPARK_HOME": str(spark_home),
        "SPARK_CONF_DIR": str(SPARK_CONF),
        "PYSPARK_PYTHON": sys.executable,
    }
    # The tests' own, which every JVM mentions on stderr.
    environment.pop("JAVA_TOOL_OPTIONS", None)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (report,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    answer: dict[str, Any] = json.loads(report)
    # One line each: whatever else a user would have to read past.
    answer["stderr"] = [line for line in done.stderr.splitlines() if "incubator" not in line]
    return answer


@pytest.fixture
def spark_home(tmp_path: Path) -> Path:
    """A home made of links: local-cluster writes `work/` into its home."""
    installed = Path(pyspark.__file__).parent
    for item in installed.iterdir():
        (tmp_path / item.name).symlink_to(item)
    return tmp_path


@pytest.mark.slow
def test_one_machine(spark_home: Path) -> None:
    wanted = settings_of("spark-defaults.conf")
    every_key = {k for path in SPARK_CONF.glob("*.conf") for k in settings_of(path.name)}

    report = submit(spark_home, keys=every_key)

    assert report["unknown"] == sorted(UNDECLARED)
    assert report["stderr"] == []
    for key, value in wanted.items():
        assert value in report["settings"][key]


@pytest.mark.slow
def test_several_executors(spark_home: Path) -> None:
    wanted = settings_of("spark-defaults.conf") | settings_of("standalone.conf")

    report = submit(
        spark_home,
        *("--properties-file", str(SPARK_CONF / "standalone.conf"), "--load-spark-defaults"),
        # Without these the first executor may have done all the work before the second is up.
        *("--conf", "spark.scheduler.minRegisteredResourcesRatio=1.0"),
        *("--conf", "spark.scheduler.maxRegisteredResourcesWaitingTime=60s"),
        keys=set(),
    )

    assert report["executors"] == 2
    assert report["versions"] == ["0.1.0"]
    for key, value in wanted.items():
        assert value in report["settings"][key]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classic", "connect"])
def test_a_program_warns_of_nothing_that_nobody_can_act_on(tmp_path: Path, kind: str) -> None:
    program = str(ROOT / "integration" / "spark_quiet_probe.py")
    environment = {
        **os.environ,
        "SPARK_CONF_DIR": str(SPARK_CONF),
        "PYSPARK_PYTHON": sys.executable,
        # Lets the server of Spark Connect take a free port.
        "SPARK_TESTING": "1",
    }
    environment.pop("JAVA_TOOL_OPTIONS", None)
    with ServiceProcess(tmp_path / "service") as service:
        done = subprocess.run(
            [sys.executable, program, service.endpoint, str(tmp_path), kind],
            env=environment,
            # Spark's warehouse is a folder where a program stands.
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    assert (done.returncode, done.stdout.strip()) == (0, "3"), done.stderr[-4000:]
    # Beside them Spark draws its progress.
    assert [line for line in done.stderr.splitlines() if " WARN " in line] == []
