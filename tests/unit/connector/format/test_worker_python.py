"""Spark's workers run a Python that finds the package."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from streamhouse.connector.format._worker_python import use_own_python
from streamhouse.core.errors import InvalidRequestError

CHOSEN: Final = {"spark.pyspark.python": "chosen"}


def _session(python: str, *, master: str = "local[2]", conf: Mapping[str, str] = {}) -> Any:
    # Spark's own starter sets the files to ship in any case.
    settings = {"spark.submit.pyFiles": "", **conf}
    context = SimpleNamespace(
        master=master,
        pythonExec=python,
        listFiles=[],
        getConf=lambda: SimpleNamespace(contains=settings.__contains__, get=settings.get),
    )
    return SimpleNamespace(_jsparkSession=object(), sparkContext=context)


@pytest.fixture(autouse=True)
def nobody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def other_python(tmp_path: Path) -> str:
    """A Python without the package."""
    path = tmp_path / "python3"
    path.write_text(f'#!/bin/sh\nexec {sys.base_prefix}/bin/python3 -I -S "$@"\n')
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize("command", ["python3", "no-such-python"])
def test_local_workers_run_the_programs_own_python(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    spark = _session(command)
    use_own_python(spark)
    assert spark.sparkContext.pythonExec == sys.executable


def test_a_chosen_python_without_the_package_is_refused(
    other_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = f"'{other_python}'.*does not find the package streamhouse.*{sys.executable}"
    with pytest.raises(InvalidRequestError, match=message):
        use_own_python(_session(other_python, conf=CHOSEN))
    monkeypatch.setenv("PYSPARK_PYTHON", other_python)
    with pytest.raises(InvalidRequestError, match=message):
        use_own_python(_session(other_python))


def test_what_works_stays(other_python: str, tmp_path: Path) -> None:
    with_package = tmp_path / "python-of-mine"
    with_package.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    with_package.chmod(0o700)
    shipped = _session(other_python)
    shipped.sparkContext.listFiles.append("file:/streamhouse.zip")
    submitted = _session(other_python, conf={"spark.submit.pyFiles": "a.zip", **CHOSEN})
    chosen = _session(str(with_package), conf=CHOSEN)
    cluster = _session("python3", master="spark://host:7077")
    for spark in (shipped, submitted, chosen, cluster, _session(sys.executable)):
        python = spark.sparkContext.pythonExec
        use_own_python(spark)
        assert spark.sparkContext.pythonExec == python
