"""README's steps under Spark Connect, in every version of PySpark: `make test-spark`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.python_process import python_for_spark
from tests.support.service_process import ServiceProcess

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_the_steps_of_the_readme(tmp_path: Path) -> None:
    pytest.importorskip("grpc_status", reason="Spark Connect's client needs the extra [connect]")
    classic, connect = '.master("local[2]")', '.remote("local[2]")'
    steps = "\n\n".join(BLOCK.findall(README.read_text()))
    assert steps.count(classic) == 1
    program = tmp_path / "steps.py"
    program.write_text(steps.replace(classic, connect))

    with ServiceProcess(tmp_path / "data") as service:
        finished = subprocess.run(
            [sys.executable, str(program)],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYSPARK_PYTHON": python_for_spark(),
                "STREAMHOUSE_ENDPOINT": service.endpoint,
            },
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )

    assert finished.returncode == 0, f"{finished.stdout[-3_000:]}\n{finished.stderr[-6_000:]}"
    lines = finished.stdout.splitlines()
    # All 1,000 rows are counted, and the lookup and the changelog have the client's change.
    assert len(re.findall(r"\| *143\|", finished.stdout)) == 6
    assert "{'shop': 6, 'city': 'Bergen'}" in lines
    assert re.findall(r"\| *([+-][IUD]) *\|", finished.stdout) == ["+I", "+I", "-U", "+U"]
