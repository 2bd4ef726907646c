"""What an import brings in, seen in a fresh interpreter.

Spark's workers import the connector anew every minute or so, and every process that only wants a
client pays for what `import streamhouse` loads.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Final

import pytest

from tests.architecture.source_files import library_files

ENGINES: Final = {"rocksdict", "fastapi", "starlette", "uvicorn", "pyiceberg", "sqlalchemy"}
SPARK: Final = {"pyspark", "py4j", "pandas"}

_PROGRAM: Final = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def _loaded_by(*modules: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *modules], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def _modules_of(*prefixes: str) -> list[str]:
    """Library modules below these packages, by what is on disk."""
    return [
        file.module
        for file in library_files()
        if any(file.module == p or file.module.startswith(f"{p}.") for p in prefixes)
        and file.path.name != "__main__.py"
    ]


def test_the_package_alone_loads_nothing_else() -> None:
    loaded = _loaded_by("streamhouse")

    assert not loaded & (ENGINES | SPARK | {"pyarrow", "numpy", "httptools"})


def test_the_client_loads_no_engine_and_no_spark() -> None:
    modules = _modules_of(
        "streamhouse.client",
        "streamhouse.core.model",
        "streamhouse.core.wire",
        "streamhouse.core.errors",
    )
    assert "streamhouse.core.errors" in modules

    loaded = _loaded_by("streamhouse", *modules)

    assert not loaded & (ENGINES | SPARK)


def test_the_log_loads_no_web_framework_and_no_lake() -> None:
    modules = _modules_of("streamhouse.storage_service.log")
    assert modules

    loaded = _loaded_by(*modules)

    assert not loaded & (ENGINES | SPARK)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        # What Spark unpickles on an executor: a source, its readers, its writers.
        "streamhouse.connector.format.data_source",
        "streamhouse.connector._partition_reader",
        "streamhouse.connector.stream._stream_reader",
        "streamhouse.reading.scan.split_reader",
        "streamhouse.connector.write._writers",
    ],
)
def test_an_executor_loads_no_engine_and_no_sql_parser(module: str) -> None:
    loaded = _loaded_by(module)

    # pandas is not ours to keep out: pyarrow loads it with the first array made from Python.
    assert not loaded & (ENGINES | {"sqlglot", "click", "rich"})


def test_a_tiering_task_is_plain_python() -> None:
    loaded = _loaded_by("streamhouse.reading.tail.lake_task")

    assert not loaded & (ENGINES | {"pyspark", "py4j", "sqlglot"})


def test_help_waits_for_nothing() -> None:
    loaded = _loaded_by("streamhouse.cli")

    assert not loaded & (ENGINES | SPARK | {"pyarrow", "sqlglot"})
