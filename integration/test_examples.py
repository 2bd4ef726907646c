"""Every Python example of the documents, and every program in examples/, runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.python_process import python_for_spark
from tests.support.service_process import ServiceProcess

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DOCUMENTS = sorted(
    path
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("spark_conf/*.md")]
    if BLOCK.search(path.read_text())
)


def _run(
    arguments: list[str], *, cwd: Path, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYSPARK_PYTHON": python_for_spark(), **env},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert finished.returncode == 0, f"{finished.stdout[-3_000:]}\n{finished.stderr[-6_000:]}"
    return finished


@pytest.mark.end_to_end
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_examples_of_a_document_run_in_order(document: Path, tmp_path: Path) -> None:
    """A reader types them top to bottom, against a new service."""
    program = tmp_path / "examples.py"
    program.write_text("\n\n".join(BLOCK.findall(document.read_text())))

    with ServiceProcess(tmp_path / "data") as service:
        _run([str(program)], cwd=tmp_path, env={"STREAMHOUSE_ENDPOINT": service.endpoint})


@pytest.mark.end_to_end
def test_the_quickstart_reads_back_every_flight(tmp_path: Path) -> None:
    finished = _run([str(ROOT / "examples" / "quickstart.py")], cwd=tmp_path, env={})

    assert "308,497 rows = 252,392 from Iceberg + 56,105 from the log" in finished.stdout
    assert "336,776 rows in all, every flight once" in finished.stdout
    assert "United: 58,665 flights" in finished.stdout
    assert "16 carriers, each equal to a full count over all flights" in finished.stdout
    assert "DuckDB on Iceberg" in finished.stdout
