"""Iceberg Java (Spark 3.5) deletes, updates and merges rows through the catalog.

Of format versions 2 and 3, by merge on read and by copy on write.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.judges.engines import run_in_spark35
from streamhouse.api.client import StreamhouseClient
from tests.support.foreign_changes import (
    REFUSED_OF_KEY_TABLES,
    REFUSED_OF_LOG_TABLES,
    SCHEMA,
)
from tests.support.foreign_table import ForeignTable, attached_duckdb
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.slow, pytest.mark.judge, pytest.mark.timeout(900)]

MODES = {"mor": "merge-on-read", "cow": "copy-on-write"}
STATEMENTS = ("delete", "update", "merge")
PROPERTIES = {
    "table.log.ttl": "1ms",
    "table.log.segment-bytes": "64kb",
    "table.datalake.auto-maintenance": "false",
}
REWRITE_ALL = "options => map('rewrite-all', 'true')"
READ = "SELECT id, name FROM {t} ORDER BY id"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path, "--retention-interval-ms", "50") as started:
        yield started


class _Work:
    """Statements for Spark, and the answer that each must have."""

    def __init__(self) -> None:
        self._statements: list[str] = []
        self._expected: list[Any] = []

    def add(self, table: ForeignTable, statement: str, expected: Any = ()) -> None:
        self._statements.append(statement.format(t=f"lake.{table.path}"))
        self._expected.append(expected)

    def change(self, table: ForeignTable, seed: int, count: int) -> None:
        for statement in table.model.statements(seed, count):
            self.add(table, statement)
            self.add(table, READ, [{"id": k, "name": n} for k, n in table.model.lake_rows])

    def compact(self, table: ForeignTable) -> None:
        for procedure in ("rewrite_position_delete_files", "rewrite_data_files"):
            call = f"CALL lake.system.{procedure}(table => '{table.path}', {REWRITE_ALL})"
            self.add(table, call, None)

    def run(self, service: ServiceProcess) -> None:
        answers = run_in_spark35(self._statements, uri=f"{service.endpoint}/iceberg")
        for statement, expected, answer in zip(
            self._statements, self._expected, answers, strict=True
        ):
            if isinstance(expected, str):
                assert "ForbiddenException" in answer["error"], statement
                assert expected in answer["error"], statement
            elif expected is None:
                assert "error" not in answer, (statement, answer)
            else:
                assert answer == list(expected), statement


def test_spark_changes_rows_of_log_tables_and_none_of_key_tables(service: ServiceProcess) -> None:
    with StreamhouseClient(service.endpoint) as client, attached_duckdb(service.endpoint) as duckdb:
        log_tables, key_tables, work = [], [], _Work()
        for version in "23":
            properties = PROPERTIES | {"table.datalake.format-version": version}
            for mode, write in MODES.items():
                table = ForeignTable(client, duckdb, f"log_{mode}{version}")
                client.create_table(table.path, SCHEMA, bucket_count=2, properties=properties)
                _fill(table)
                log_tables.append(table)
                modes = ", ".join(f"'write.{w}.mode' = '{write}'" for w in STATEMENTS)
                work.add(table, f"ALTER TABLE {{t}} SET TBLPROPERTIES ({modes})")
                work.change(table, 1, 6)
                for statement, reason in REFUSED_OF_LOG_TABLES.items():
                    work.add(table, statement, reason)
            keyed = ForeignTable(client, duckdb, f"key{version}")
            client.create_table(keyed.path, SCHEMA, primary_key=["id"], properties=properties)
            _fill(keyed)
            # Another version of some rows, whose older versions are deleted in the lake.
            keyed.upsert_again(range(0, 300, 7))
            keyed.tier()
            key_tables.append(keyed)
            for statement in REFUSED_OF_KEY_TABLES:
                work.add(keyed, statement, "through the streamhouse service only")

        work.run(service)

        for table in log_tables:
            if "mor" in table.path:
                # DuckDB 1.5 refuses tables whose property says copy on write.
                table.change(2, 3)
        again = _Work()
        for table in log_tables:
            table.tier()
            table.maintain()
            again.change(table, 3, 2)
            again.compact(table)
            again.change(table, 4, 2)
        for table in key_tables:
            again.compact(table)
        again.run(service)
        for table in (*log_tables, *key_tables):
            table.check(table.path)
            table.append(20)
            table.tier()
            table.check(table.path)
        for table in log_tables:
            table.check_stream()


def _fill(table: ForeignTable) -> None:
    """Three rounds, and rows in the log alone."""
    for _ in range(3):
        table.append(100)
        table.tier()
    table.append(20)
