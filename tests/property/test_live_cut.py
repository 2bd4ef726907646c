"""Live cuts between writes, rounds, compactions and changes of the table: stock pyiceberg reads
exactly the rows of the table in every cut.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.table import StaticTable

from streamhouse import StreamhouseClient
from streamhouse.client import StorageClient
from streamhouse.core.errors import InvalidSchemaError
from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.lake.catalogs._sql_catalog import open_catalog
from streamhouse.lake.guards.served_tables import ServedTable
from streamhouse.lake.staged_lake import StagedLake
from streamhouse.reading.live.live_table import LiveCut, LiveLakeTable
from streamhouse.tiering.worker.maintain_job import maintain_table
from streamhouse.tiering.worker.thread_runner import ThreadRunner
from tests.support.examples import examples
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

NAMES = itertools.count()
IDS = 12
PARTITIONINGS: tuple[tuple[str, ...], ...] = (
    (),
    ("b",),
    ("bucket(3, id)",),
    ("truncate(2, id)", "b"),
)
SYSTEM = ("__bucket", "__offset", "__timestamp")


class Life:
    """A table's life: its columns now, and its rows by those names."""

    def __init__(
        self,
        client: StreamhouseClient,
        *,
        is_keyed: bool,
        has_layout: bool,
        partitioned: int,
        version: str,
    ) -> None:
        self.client = client
        self.storage = StorageClient.of(client)
        self.path = f"default.live_{next(NAMES)}"
        self.is_keyed = is_keyed
        self.columns = {"id": pa.int64(), "a": pa.int32(), "b": pa.string()}
        self.rows: list[dict[str, Any]] = []
        self.number = 0
        self.is_partitioned = "b" in PARTITIONINGS[partitioned]
        properties = {"table.datalake.format-version": version}
        if is_keyed:
            properties["table.datalake.changelog"] = "true"
        if has_layout:
            properties["table.datalake.batch-layout.sort"] = "id"
        client.create_table(
            self.path,
            pa.schema([pa.field("id", pa.int64(), False), ("a", pa.int32()), ("b", pa.string())]),
            primary_key=["id"] if is_keyed else [],
            bucket_key=["id"],
            bucket_count=2,
            partitioned_by=PARTITIONINGS[partitioned],
            properties=properties,
        )
        self.described = client.lake_catalog()
        self.catalog = open_catalog(self.described)
        lake = StagedLake(self.catalog, self.described)
        self.live = LiveLakeTable(lake)
        self.changes = LiveLakeTable(lake, role=LakeRole.CHANGES) if is_keyed else None
        self.layout = LiveLakeTable(lake, role=LakeRole.BATCH) if has_layout else None

    def close(self) -> None:
        self.catalog.close()

    def _batch(self, seed: int, count: int, columns: list[str]) -> pa.Table:
        rows = []
        for n in range(count):
            self.number += 1
            row_id = (seed + 5 * n) % IDS if self.is_keyed else self.number
            values = {"id": row_id}
            for name in columns:
                values[name] = self._value(name, seed + n)
            rows.append(values)
        return pa.Table.from_pylist(rows, schema=pa.schema([(c, self.columns[c]) for c in columns]))

    def _value(self, name: str, seed: int) -> Any:
        if name == "id":
            return (seed * 5) % IDS if self.is_keyed else self.number
        if seed % 5 == 0:
            return None
        return f"v{seed % 3}" if self.columns[name] == pa.string() else self.number

    def _put(self, rows: list[dict[str, Any]]) -> None:
        if not self.is_keyed:
            self.rows += rows
            return
        by_id = {row["id"]: row for row in self.rows}
        for row in rows:
            whole = by_id.get(row["id"], dict.fromkeys(self.columns))
            by_id[row["id"]] = {**whole, **row}
        self.rows = list(by_id.values())

    def write(self, seed: int, count: int) -> None:
        batch = self._batch(seed, count, list(self.columns))
        if self.is_keyed:
            self.client.upsert(self.path, batch)
        else:
            self.client.append(self.path, batch)
        self._put(batch.to_pylist())

    def update_some(self, seed: int, count: int) -> None:
        if self.is_keyed:
            columns = ["id", list(self.columns)[-1]]
            batch = self._batch(seed, count, columns)
            self.client.upsert(self.path, batch, columns=columns)
            self._put(batch.to_pylist())

    def delete(self, seed: int, count: int) -> None:
        if self.is_keyed:
            gone = {(seed * 3 + n) % IDS for n in range(count)}
            self.client.delete(self.path, pa.table({"id": pa.array(sorted(gone), pa.int64())}))
            self.rows = [row for row in self.rows if row["id"] not in gone]

    def overwrite(self, seed: int, count: int) -> None:
        batch = self._batch(seed, count % 3, list(self.columns))
        with self.client.begin_transaction(self.path, operation="overwrite") as transaction:
            transaction.commit([transaction.stage(batch)] if batch.num_rows else [])
        self.rows = []
        self._put(batch.to_pylist())

    def tier(self, seed: int, count: int) -> None:
        del seed, count
        tier_once(self.client, self.path)

    def maintain(self, seed: int, count: int) -> None:
        del seed, count
        maintain_table(self.storage, self.described, ThreadRunner(1), self.path)

    def rename(self, seed: int, count: int) -> None:
        del count
        old = list(self.columns)[1 + seed % 2]
        new = f"c{next(NAMES)}"
        self.client.rename_column(self.path, old, new)
        self.columns = {new if n == old else n: t for n, t in self.columns.items()}
        self.rows = [{new if n == old else n: v for n, v in r.items()} for r in self.rows]

    def drop_and_add_again(self, seed: int, count: int) -> None:
        """Drop the last column; a new one of its name has no values."""
        del count
        name = list(self.columns)[-1]
        if self.is_partitioned and name == list(self.columns)[2]:
            return
        self.client.drop_column(self.path, name, confirm=name)
        column_type = self.columns.pop(name)
        self.rows = [{n: v for n, v in row.items() if n != name} for row in self.rows]
        if seed % 2:
            self.check(0, 0)
        try:
            self.client.add_column(self.path, name, column_type)
        except InvalidSchemaError:
            # A partition field had the name.
            name = f"{name}_again"
            self.client.add_column(self.path, name, column_type)
        self.columns[name] = column_type
        self.rows = [{**row, name: None} for row in self.rows]

    def widen(self, seed: int, count: int) -> None:
        del seed, count
        name = list(self.columns)[1]
        if self.columns[name] == pa.int32():
            self.client.widen_column(self.path, name, pa.int64())
            self.columns[name] = pa.int64()

    def partition(self, seed: int, count: int) -> None:
        del count
        chosen = PARTITIONINGS[seed % len(PARTITIONINGS)]
        last = list(self.columns)[2]
        self.client.alter_partitioning(
            self.path, [last if text == "b" else text for text in chosen]
        )
        self.is_partitioned = "b" in chosen

    def check(self, seed: int, count: int) -> None:
        del seed, count
        self._check_rows(self._read(self.live))
        if self.changes is not None:
            self._check_changes(self._read(self.changes))
        if self.layout is not None:
            self._check_rows(self._read(self.layout))

    def _check_rows(self, read: pa.Table) -> None:
        names = [name for name in read.column_names if name not in SYSTEM]
        expected = [{name: row.get(name) for name in names} for row in self.rows]
        assert _by_id(read.select(names).to_pylist()) == _by_id(expected)
        addresses = read.select(["__bucket", "__offset"]).to_pylist()
        assert len({tuple(row.values()) for row in addresses}) == len(addresses)

    def _check_changes(self, read: pa.Table) -> None:
        kinds = read["__change_type"].to_pylist()
        ends = self.storage.table_state(self.path).positions
        assert len(kinds) == sum(at.high_watermark for at in ends.values())
        grown = sum(k == "+I" for k in kinds) - sum(k == "-D" for k in kinds)
        assert grown == len(self.rows)

    def _read(self, live: LiveLakeTable) -> pa.Table:
        state = self.storage.table_state(self.path)
        served = ServedTable(info=state.table, lake=state.lake, positions=state.positions)
        cut: LiveCut = live.cut(served, self.storage, now_s=time.time())
        assert live.cut(served, self.storage, now_s=time.time()) is cut
        assert cut.metadata_location is not None
        return StaticTable.from_metadata(cut.metadata_location).scan().to_arrow()


def _by_id(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["id"])


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamhouseClient]:
    folder: Path = tmp_path_factory.mktemp("live")
    arguments = (
        *("--catalog-property", "type=sql"),
        *("--catalog-property", f"uri=sqlite:///{folder / 'catalog.db'}"),
        *("--warehouse", f"file://{folder / 'lake'}"),
    )
    with (
        ServiceProcess(folder / "data", *arguments) as service,
        StreamhouseClient(service.endpoint) as opened,
    ):
        yield opened


STEPS = [
    *["write", "check"] * 3,
    *["update_some", "delete", "tier"] * 2,
    *("overwrite", "maintain", "rename", "drop_and_add_again", "widen", "partition"),
]


@settings(
    max_examples=examples(12),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    is_keyed=st.booleans(),
    has_layout=st.booleans(),
    partitioned=st.integers(0, len(PARTITIONINGS) - 1),
    version=st.sampled_from(["2", "3"]),
    steps=st.lists(
        st.tuples(st.sampled_from(STEPS), st.integers(0, 20), st.integers(1, 6)),
        min_size=3,
        max_size=14,
    ),
)
def test_every_cut_has_exactly_the_rows(
    client: StreamhouseClient,
    is_keyed: bool,
    has_layout: bool,
    partitioned: int,
    version: str,
    steps: list[tuple[str, int, int]],
) -> None:
    life = Life(
        client,
        is_keyed=is_keyed,
        has_layout=has_layout,
        partitioned=partitioned,
        version=version,
    )
    try:
        for step, seed, count in steps:
            getattr(life, step)(seed, count)
        life.check(0, 0)
    finally:
        life.close()
