"""A data directory with tables of every kind, and every row that was acknowledged in it.

The directory is built by a real service process, with a tiering worker, in three stages. It is
copied after the first (`older`) and at the end (`kept`). The lake knows its files by their paths,
so an attacked copy always lies where the original was.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from streamhouse.api.client import StreamhouseClient
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

__all__ = ["NEW_ROWS_FROM", "SERVICE_OPTIONS", "AttackedTable", "World", "build_world", "key_rows"]

ROWS: Final = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("amount", pa.float64()),
    ]
)
KEYS: Final = pa.schema([ROWS.field("id")])
BUCKETS: Final = 2
NEW_ROWS_FROM: Final = 100_000
"""Ids from here on are written after an attack."""

# Retention would take what a judge still wants to see.
SERVICE_OPTIONS: Final = ("--tiering-backoff-ms-min", "50", "--tiering-lease-ms", "1000")

_SMALL: Final = {"table.log.segment-bytes": "64kb"}
_NO_LAKE: Final = {**_SMALL, "table.datalake.enabled": "false"}
_SIDE_TABLES: Final = {
    **_SMALL,
    "table.datalake.changelog": "true",
    "table.datalake.batch-layout.sort": "name",
}
_VECTORS: Final = {**_SMALL, "table.datalake.format-version": "3"}
_NEW_COLUMN: Final = "note"


@dataclass
class AttackedTable:
    """One table and what it must answer: id -> row, a dict a row, exact."""

    path: str
    is_keyed: bool
    properties: Mapping[str, str] = field(default_factory=dict)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    """Ids that were deleted or overwritten: none of them may come back."""
    columns: tuple[str, ...] = ("id", "name", "amount")

    @property
    def has_lake(self) -> bool:
        """Whether rounds take its rows to the lake."""
        return self.properties.get("table.datalake.enabled") != "false"

    def put(self, rows: pa.Table) -> None:
        """Remember rows that were acknowledged."""
        for row in rows.to_pylist():
            whole = dict.fromkeys(self.columns) | row
            self.rows[row["id"]] = whole
            self.gone.discard(row["id"])

    def take(self, ids: Iterable[int]) -> None:
        """Remember that rows were deleted."""
        for one in ids:
            if self.rows.pop(one, None) is not None:
                self.gone.add(one)

    def add_column(self, name: str) -> None:
        """Remember a column that was added."""
        self.columns = (*self.columns, name)
        for row in self.rows.values():
            row[name] = None


@dataclass(frozen=True)
class World:
    """The directory, its copies, and the truth about it."""

    data: Path
    older: Path
    kept: Path
    tables: Mapping[str, AttackedTable]

    def put_back(self) -> None:
        """Make the directory what it was at the end."""
        shutil.rmtree(self.data, ignore_errors=True)
        shutil.copytree(self.kept, self.data, symlinks=True)


def key_rows(ids: Iterable[int], name: str) -> pa.Table:
    """Return rows of `ids`; the name is long enough for several segments."""
    some = list(ids)
    names = [f"{name}-{one}-{'x' * 200}" for one in some]
    return pa.table({"id": some, "name": names, "amount": [one / 4 for one in some]}, schema=ROWS)


def build_world(place: Path) -> World:
    """Build the directory below `place`, which must not exist."""
    place.mkdir()
    data, older, kept = place / "data", place / "older", place / "kept"
    tables = {
        table.path: table
        for table in (
            AttackedTable("default.log", is_keyed=False, properties=_NO_LAKE),
            AttackedTable("default.lake_log", is_keyed=False, properties=_SMALL),
            AttackedTable("default.overwritten", is_keyed=False, properties=_NO_LAKE),
            AttackedTable("default.keys", is_keyed=True, properties=_NO_LAKE),
            AttackedTable("default.lake_keys", is_keyed=True, properties=_SIDE_TABLES),
            AttackedTable("default.lake_vectors", is_keyed=True, properties=_VECTORS),
            AttackedTable("default.empty", is_keyed=False, properties=_SMALL),
        )
    }
    _live(data, tables, _first_stage)
    shutil.copytree(data, older)
    _live(data, tables, _second_stage)
    _live(data, tables, _third_stage, is_killed=True)
    shutil.copytree(data, kept)
    return World(data, older, kept, tables)


def _live(
    data: Path, tables: Mapping[str, AttackedTable], stage: Any, *, is_killed: bool = False
) -> None:
    with (
        ServiceProcess(data, *SERVICE_OPTIONS) as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        stage(client, tables)
        if is_killed:
            service.kill()
        else:
            assert service.terminate() == 0


def _first_stage(client: StreamhouseClient, tables: Mapping[str, AttackedTable]) -> None:
    for table in tables.values():
        client.create_table(
            table.path,
            ROWS,
            primary_key=["id"] if table.is_keyed else [],
            bucket_count=BUCKETS,
            properties=table.properties,
        )
    for table in tables.values():
        if table.path != "default.empty":
            _write(client, table, key_rows(range(400), "first"))
    tier_once(client)


def _second_stage(client: StreamhouseClient, tables: Mapping[str, AttackedTable]) -> None:
    for name in ("default.log", "default.lake_log"):
        for start in range(400, 1_000, 100):
            _write(client, tables[name], key_rows(range(start, start + 100), "second"))
    for name in ("default.keys", "default.lake_keys", "default.lake_vectors"):
        _write(client, tables[name], key_rows(range(200, 700), "second"))
        gone = range(50, 150)
        client.delete(name, pa.table({"id": gone}, schema=KEYS))
        tables[name].take(gone)
    overwritten = tables["default.overwritten"]
    overwritten.take(list(overwritten.rows))
    rows = key_rows(range(1_000, 1_300), "overwrite")
    with client.begin_transaction(
        overwritten.path, operation="overwrite", app_id="job", version=1
    ) as overwrite:
        overwrite.commit([overwrite.stage(rows)])
    overwritten.put(rows)
    tier_once(client)
    for name in ("default.lake_log", "default.lake_keys", "default.lake_vectors"):
        client.add_column(name, _NEW_COLUMN, pa.string())
        tables[name].add_column(_NEW_COLUMN)


def _third_stage(client: StreamhouseClient, tables: Mapping[str, AttackedTable]) -> None:
    for table in tables.values():
        if table.path == "default.empty":
            continue
        _write(client, table, key_rows(range(2_000, 2_050), "third"))
    for name in ("default.keys", "default.lake_keys", "default.lake_vectors"):
        _write(client, tables[name], key_rows(range(150, 250), "third"))
    rows = key_rows(range(3_000, 3_020), "transaction")
    for name in ("default.log", "default.keys"):
        operation = "upsert" if tables[name].is_keyed else "append"
        done = client.begin_transaction(name, operation=operation, app_id="job", version=1)
        done.commit([done.stage(rows)])
        tables[name].put(rows)
    # One that nobody has committed: none of its rows may ever be seen.
    client.begin_transaction("default.log").stage(key_rows(range(4_000, 4_010), "open"))
    tables["default.log"].gone.update(range(4_000, 4_010))


def _write(client: StreamhouseClient, table: AttackedTable, rows: pa.Table) -> None:
    if table.is_keyed:
        client.upsert(table.path, rows)
    else:
        client.append(table.path, rows)
    table.put(rows)
