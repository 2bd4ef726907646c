"""Every Python example of the documents, and every program in examples/, runs as it stands."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.support.free_ports import free_port
from tests.support.python_process import python_for_spark
from tests.support.service_process import ServiceProcess

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DOCUMENTS = sorted(
    path
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("spark_conf/*.md")]
    if BLOCK.search(path.read_text())
)
# A newcomer reads these in order, with one service.
SPARK = ["spark", "spark_sql", "spark_changes", "spark_streams"]
FIRST = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in SPARK)]
READINGS = [FIRST, *([path] for path in DOCUMENTS if path not in FIRST)]
# What a document's reader starts the service with, beside the data directory and the port.
SERVED = {"getting_started": ("--tiering", "embedded")}


# Runs the programs it is told of one after the other; what has started Java keeps it.
_READER = """
import os, runpy, sys, traceback
for line in sys.stdin:
    program, outcome = line.strip(), "done"
    try:
        runpy.run_path(program, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        outcome = "failed"
    from pyspark.sql import SparkSession
    if (session := SparkSession.getActiveSession()) is not None:
        session.stop()
    print(f"\\n{outcome}: {program}", flush=True)
"""


class Reader:
    """Somebody who types one document after another, each in a folder that is empty then.

    Spark's Python workers have the environment that Java was started with: all services have one
    address. DuckDB has its extensions, which it would fetch otherwise.
    """

    def __init__(self, home: Path, extensions: Path) -> None:
        self.port = str(free_port())
        self._home = home
        self._python = subprocess.Popen(
            [sys.executable, "-u", "-c", _READER],
            cwd=home,
            env={
                **os.environ,
                "HOME": str(_with_extensions(extensions)),
                "PYSPARK_PYTHON": python_for_spark(),
                "STREAMHOUSE_ENDPOINT": f"http://127.0.0.1:{self.port}",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, program: Path) -> None:
        """Run a program; raises with what it said unless it came to its end."""
        typed, said = self._python.stdin, self._python.stdout
        assert typed is not None
        assert said is not None
        print(program, file=typed, flush=True)
        lines = []
        for line in said:
            lines.append(line)
            if line.endswith(f": {program}\n"):
                break
        assert lines[-1:] == [f"done: {program}\n"], "".join(lines)[-9_000:]
        # Java stays in the folder, and the next document has checkpoints of its own.
        for left in self._home.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()

    def end(self) -> None:
        with self._python as python:
            python.communicate(timeout=60)


def _with_extensions(home: Path) -> Path:
    """Install DuckDB's extensions into a home folder, from their wheels."""
    platform = duckdb.sql("PRAGMA platform").fetchall()[0][0]
    version = f"v{duckdb.__version__}"
    folder = home / ".duckdb" / "extensions" / version / platform
    folder.mkdir(parents=True)
    for name in ("avro", "httpfs", "iceberg"):
        file = f"{name}.duckdb_extension"
        wheel = resources.files(f"duckdb_extension_{name}") / "extensions" / version / file
        (folder / file).symlink_to(str(wheel))
    return home


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    opened = Reader(tmp_path_factory.mktemp("reader"), tmp_path_factory.mktemp("home"))
    yield opened
    opened.end()


@pytest.mark.end_to_end
@pytest.mark.parametrize("documents", READINGS, ids=lambda paths: "+".join(p.name for p in paths))
def test_the_examples_of_a_document_run_in_order(
    documents: list[Path], reader: Reader, tmp_path: Path
) -> None:
    """A reader types them top to bottom, against a new service."""
    options = SERVED.get(documents[0].stem, ())
    with ServiceProcess(tmp_path / "data", "--port", reader.port, *options):
        for document in documents:
            program = tmp_path / f"{document.stem}.py"
            program.write_text("\n\n".join(BLOCK.findall(document.read_text())))
            reader.run(program)


@pytest.mark.end_to_end
def test_the_quickstart_reads_back_every_flight(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "quickstart.py")],
        cwd=tmp_path,
        env={**os.environ, "PYSPARK_PYTHON": python_for_spark()},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )

    assert finished.returncode == 0, f"{finished.stdout[-3_000:]}\n{finished.stderr[-6_000:]}"
    assert "308,497 rows = 252,392 from Iceberg + 56,105 from the log" in finished.stdout
    assert "336,776 rows in all, every flight once" in finished.stdout
    assert "United: 58,665 flights" in finished.stdout
    assert "16 carriers, each equal to a full count over all flights" in finished.stdout
    assert "DuckDB on Iceberg" in finished.stdout


@pytest.mark.end_to_end
def test_the_notebook_shows_what_is_saved_in_it(tmp_path: Path) -> None:
    """After a change: `python -m integration.executed_notebook examples/notebook.ipynb`."""
    saved = ROOT / "examples" / "notebook.ipynb"
    copy = Path(shutil.copy(saved, tmp_path))
    finished = subprocess.run(
        [sys.executable, "-m", "integration.executed_notebook", str(copy)],
        cwd=tmp_path,
        env={
            **os.environ,
            "MPLBACKEND": "agg",
            "PYSPARK_PYTHON": python_for_spark(),
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )

    assert finished.returncode == 0, f"{finished.stdout[-3_000:]}\n{finished.stderr[-6_000:]}"
    assert _results(copy) == _results(saved)
    assert any("image/png" in output["data"] for output in _outputs(saved)), "save a picture"
    assert saved.stat().st_size < 60_000


def _outputs(notebook: Path) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [output for cell in cells for output in cell.get("outputs", ())]


def _results(notebook: Path) -> list[str]:
    return ["".join(output["data"]["text/plain"]) for output in _outputs(notebook)]


def test_the_declarative_pipeline_runs(tmp_path: Path) -> None:
    pytest.importorskip("pyspark.pipelines", reason="Spark has pipelines from 4.1 on")
    finished = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "pipeline" / "run.py")],
        cwd=tmp_path,
        env={**os.environ, "SPARK_CONF_DIR": str(ROOT / "spark_conf")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )

    assert finished.returncode == 0, f"{finished.stdout[-3_000:]}\n{finished.stderr[-6_000:]}"
    assert "late_flights: 50 rows" in finished.stdout
    assert "delay_by_carrier: AA 15.0 of 100" in finished.stdout
    assert "delay_by_carrier: UA 0.0 of 100" in finished.stdout
    assert "pipeline.delays: 50 late flights" in finished.stdout


def test_spark_counts_what_a_kafka_producer_writes(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data", "--kafka-port", "0") as service:
        finished = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "kafka_stream.py")],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYSPARK_PYTHON": python_for_spark(),
                "PYSPARK_SUBMIT_ARGS": "--conf spark.sql.shuffle.partitions=2 pyspark-shell",
                "STREAMHOUSE_ENDPOINT": service.endpoint,
                "KAFKA_BROKERS": service.kafka_address,
            },
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )

    assert finished.returncode == 0, f"{finished.stdout[-3_000:]}\n{finished.stderr[-6_000:]}"
    assert [line for line in finished.stdout.splitlines() if "/" in line] == [
        *("|  /0|  166|", "|  /1|  167|", "|  /2|  167|"),
        *("|  /0|  333|", "|  /1|  334|", "|  /2|  333|"),
    ]
