"""Every test that writes a lake: its tables, as it left them, agree in all outside readers.

The tests of `tests/` that write lakes are run into a folder of their own, twice at a time: as they
are, and with 3 as the default of Iceberg's format version. What they left, and what the tests of
`integration/` in this session left, is read by stock pyiceberg and DuckDB, every second table by
Iceberg Java and our own format in Spark too. This module is the last of a session.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.schema import Schema
from pyspark.errors import AnalysisException, PySparkException

import streamhouse
from integration.judges.duckdb_read import connect
from integration.judges.engines import ROOT, read_many_with_spark35
from integration.judges.every_lake import LeftTable, in_one_form, left_tables, pyiceberg_rows
from integration.spark_world import spark_session
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.slow, pytest.mark.judge, pytest.mark.spark]

# All that tier and leave their lakes in files; those in S3 and on PostgreSQL have their own judges.
WRITERS: Final = (
    "tests/property/test_key_tiering.py",
    "tests/property/test_maintenance.py",
    "tests/property/test_union_read.py",
    "tests/property/test_union_read_keys.py",
    "tests/service/test_adopted_side_tables.py",
    "tests/service/test_adoption.py",
    "tests/service/test_backup.py",
    "tests/service/test_check.py",
    "tests/service/test_disk_budget.py",
    "tests/service/test_import.py",
    "tests/service/test_key_rebuild.py",
    "tests/service/test_late_batch_layout.py",
    "tests/service/test_maintain_command.py",
    "tests/service/test_overwrites.py",
    "tests/service/test_rest_catalog.py",
    "tests/service/test_schema_evolution.py",
    "tests/service/test_tables_command.py",
    "tests/service/test_tiering_workers.py",
    "tests/simulation/test_maintenance_day.py",
    "tests/simulation/test_tiering_crashes.py",
    "tests/unit/connector",
    "tests/unit/storage_service/rest_catalog",
    "tests/unit/tiering",
)
# Not again in version 3: tests that draw the version themselves, or hold it against the default,
# whose other engine that writes is stock pyiceberg, or that count modules.
WRITERS_NOT_OF_VERSION_3: Final = (
    "tests/property/test_key_tiering.py",
    "tests/property/test_maintenance.py",
    "tests/property/test_union_read.py",
    "tests/property/test_union_read_keys.py",
    "tests/simulation/test_tiering_crashes.py",
    "tests/unit/connector/test_executor_imports.py",
    "tests/unit/tiering/test_format_version_3.py",
)
VERSION_3: Final = ROOT / "integration" / "judges" / "version_3"
# Read whole and compared as texts; what larger tables are made of, smaller ones have too.
_ROWS_MAX: Final = 20_000
_JAVA_TABLES_MAX: Final = 80
# A table is a job of few tasks, and planning it takes as long as reading it, in another process.
_SPARK_JOBS: Final = 2

Answers = dict[LeftTable, tuple[Schema, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> list[LeftTable]:
    home = tmp_path_factory.mktemp("lakes")
    in_version_3 = [
        *("-p", "integration.judges.stock_writers"),
        *(f"--ignore={path}" for path in WRITERS_NOT_OF_VERSION_3),
        *(path for path in WRITERS if path not in WRITERS_NOT_OF_VERSION_3),
    ]
    # They wait for a disk and for processes of their own: two runs have more of two cores than one.
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(_run_writers, home / "as-they-are", WRITERS, {}),
            pool.submit(
                _run_writers, home / "version-3", in_version_3, {"PYTHONPATH": str(VERSION_3)}
            ),
        ]
    for run in runs:
        run.result()
    return left_tables(tmp_path_factory.getbasetemp())


def _run_writers(home: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    folders = home / "made-by-tests"
    folders.mkdir(parents=True)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-p", "integration.judges.keep_folders", "-m", "not spark"),
            *(f"--basetemp={home / 'left'}", *arguments),
        ],
        env={**os.environ, "TMPDIR": str(folders), **environment},
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=3_000,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4_000:]


@pytest.fixture(scope="module")
def answers(left: list[LeftTable]) -> Answers:
    """What stock pyiceberg finds, which the others are held against."""
    read = {table: pyiceberg_rows(table) for table in left}
    return {
        table: found
        for table, found in read.items()
        if found is not None and len(found[1]) <= _ROWS_MAX
    }


@pytest.fixture(scope="module")
def sampled(answers: Answers) -> Answers:
    """Every second table, for the readers in Spark: a table takes up to a second."""
    return dict(list(answers.items())[::2])


@pytest.mark.timeout(3_600)
def test_there_are_lakes_to_judge(left: list[LeftTable], answers: Answers) -> None:
    versions = Counter(table.format_version() for table in answers)
    assert versions[2] > 300
    assert versions[3] > 300
    # Tables of many rows, and those whose test took files away on purpose.
    assert len(left) - len(answers) < len(left) // 10


@pytest.mark.timeout(600)
def test_duckdb_finds_the_same_rows(answers: Answers) -> None:
    differing = []
    with connect() as duckdb:
        for table, (schema, rows) in answers.items():
            path = table.location.removeprefix("file://").replace("'", "''")
            found = duckdb.execute(f"SELECT * FROM iceberg_scan('{path}')").to_arrow_table()
            if in_one_form(schema, found.to_pylist()) != in_one_form(schema, rows):
                differing.append(str(table))
    assert differing == []


@pytest.mark.timeout(1_500)
def test_iceberg_java_finds_the_same_rows(sampled: Answers) -> None:
    tables = list(sampled)
    differing = []
    for start in range(0, len(tables), _JAVA_TABLES_MAX):
        part = tables[start : start + _JAVA_TABLES_MAX]
        found = read_many_with_spark35([(t.location, "SELECT * FROM lake_table") for t in part])
        for table, rows in zip(part, found, strict=True):
            schema, expected = sampled[table]
            if [set(row) for row in rows] == [{"error"}]:
                differing.append(f"{table}: {rows[0]['error']}")
            elif in_one_form(schema, rows) != in_one_form(schema, expected):
                differing.append(str(table))
    assert differing == []


@pytest.fixture(scope="module")
def registered(sampled: Answers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service whose catalog has all these tables, as left.t0, left.t1 and so on; its endpoint."""
    folder = tmp_path_factory.mktemp("registered")
    uri = f"sqlite:///{folder / 'catalog.db'}"
    catalog = load_catalog("streamhouse", type="sql", uri=uri)
    catalog.create_namespace("left")
    for number, table in enumerate(sampled):
        catalog.register_table(f"left.t{number}", table.location)
    catalog.close()
    arguments = ("--catalog-property=type=sql", f"--catalog-property=uri={uri}")
    with ServiceProcess(folder / "data", *arguments) as service:
        yield service.endpoint


@pytest.mark.timeout(3_000)
def test_our_format_in_spark_finds_the_same_rows(sampled: Answers, registered: str) -> None:
    differing, refused = [], []
    with spark_session() as spark, ThreadPoolExecutor(_SPARK_JOBS) as pool:
        streamhouse.register(spark)
        reader = spark.read.format("streamhouse").option("endpoint", registered)

        def read(number: int) -> list[dict[str, Any]] | PySparkException:
            try:
                return reader.load(f"left.t{number}$iceberg").toArrow().to_pylist()
            except PySparkException as error:
                return error

        found_rows = pool.map(read, range(len(sampled)))
        for (table, (schema, rows)), found in zip(sampled.items(), found_rows, strict=True):
            if isinstance(found, AnalysisException):
                refused.append(f"{table}: {found}")
            elif isinstance(found, PySparkException):
                differing.append(f"{table}: {found}")
            elif in_one_form(schema, found, hides=True) != in_one_form(schema, rows, hides=True):
                differing.append(str(table))
    assert differing == []
    # Tables that tests of refusals make: of a type we have not, with a field renamed, or with files
    # outside of their own folder, which another engine may open.
    told = ("[unsupported] Iceberg table", "[forbidden] lake table")
    assert all(any(word in text for word in told) for text in refused), refused
    assert len(refused) <= 8, refused
