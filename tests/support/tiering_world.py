"""A world for tiering tests: a service in memory, a real Iceberg lake in a folder, real tasks.

`TieringWorld` has tables of any kind. `LogTieringWorld` and `KeyTieringWorld` have one table `db.t`
and the obvious model of what its lake table must hold: addresses of rows, and a dict of rows.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table

from streamhouse.storage_service.lake.commits.committer import IcebergLakeTable
from streamhouse.storage_service.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.storage_service.lake.lake_tables import IcebergLake
from streamhouse.storage_service.model.bucketing import buckets_for_rows
from streamhouse.storage_service.model.changelog import CHANGE_TYPE_NAMES
from streamhouse.storage_service.model.lake import SERVICE_ID_PROPERTY, LakeCatalog
from streamhouse.storage_service.model.partitioning import PartitionField
from streamhouse.storage_service.model.schema import Schema
from streamhouse.storage_service.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.storage_service.model.table_state import TieringAssignment
from streamhouse.tiering.maintain.maintenance import Maintainer
from streamhouse.tiering.maintain.maintenance_policy import Claim, MaintenancePolicy
from streamhouse.tiering.maintain.maintenance_report import MaintenanceReport
from streamhouse.tiering.round.round import RoundResult, TieringRound
from streamhouse.tiering.tasks.lake_task import run_split
from streamhouse.tiering.worker.service import TieringService
from streamhouse.tiering.worker.thread_runner import ThreadRunner
from tests.support.fake_service import FakeService
from tests.support.foreign_deletes import commit_delete_files, position_delete_file
from tests.support.kv_model import Change, Entry, KvModel, identity

__all__ = [
    "KEY_SCHEMA",
    "SCHEMA",
    "KeyTieringWorld",
    "Killed",
    "LogTieringWorld",
    "TieringWorld",
    "dying_at",
    "lake_in_folder",
    "rows",
]

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])

KEY_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("region", pa.string()),
        pa.field("amount", pa.float64()),
    ]
)

Row = dict[str, Any]
Address = tuple[int, int]


class Killed(BaseException):
    """A worker's death: nothing of the worker catches it, as nothing catches kill -9."""


def dying_at(step: str) -> Callable[[str], None]:
    """A checkpoint at which the worker dies when it has come to `step`."""

    def checkpoint(reached: str) -> None:
        if reached == step:
            raise Killed

    return checkpoint


def rows(start: int, count: int) -> pa.RecordBatch:
    """Return `count` rows of `SCHEMA` with ids from `start`; every third name is null."""
    ids = range(start, start + count)
    names = [None if i % 3 == 0 else f"n{i}" for i in ids]
    return pa.record_batch([pa.array(ids, pa.int64()), pa.array(names, pa.string())], schema=SCHEMA)


def lake_in_folder(folder: Path, **more: str) -> LakeCatalog:
    """A catalog on SQLite beside its warehouse, with `more` properties."""
    properties = {
        "type": "sql",
        "uri": f"sqlite:///{folder / 'catalog.db'}",
        "warehouse": f"file://{folder / 'warehouse'}",
    }
    return LakeCatalog(name="lake", properties=properties | more)


class TieringWorld:
    """Closed by `with`, because catalogs hold connections."""

    def __init__(self, folder: Path, *, catalog: LakeCatalog | None = None) -> None:
        self.folder = folder
        self.catalog = catalog or lake_in_folder(
            folder, **{SERVICE_ID_PROPERTY: "0123456789abcdef"}
        )
        self.service = FakeService(self.catalog)
        self.run_split = functools.partial(run_split, open_client=lambda _: self.service)
        self.runner = ThreadRunner(2, run=self.run_split)
        self._lakes: list[IcebergLake] = []
        self._judge: SqlCatalog | None = None

    def __enter__(self) -> TieringWorld:
        return self

    def __exit__(self, *error: object) -> None:
        for lake in self._lakes:
            lake.close()
        if self._judge is not None:
            self._judge.close()

    def create_table(
        self,
        path: str = "db.t",
        schema: pa.Schema = SCHEMA,
        *,
        primary_key: Sequence[str] = (),
        bucket_count: int = 1,
        bucket_key: Sequence[str] = (),
        partitioned_by: Sequence[str] = (),
        properties: dict[str, str] | None = None,
    ) -> TableInfo:
        return self.service.create_table(
            TableDescriptor(
                path=TablePath.parse(path),
                schema=Schema.from_arrow(schema),
                primary_key=tuple(primary_key),
                bucket_count=bucket_count,
                bucket_key=tuple(bucket_key),
                partitioned_by=tuple(PartitionField.parse(text) for text in partitioned_by),
                properties=properties or {},
            )
        )

    def lake(self) -> IcebergLake:
        """A worker's own connection to the catalog."""
        lake = IcebergLake(self.catalog)
        self._lakes.append(lake)
        return lake

    def claim(self, path: str = "db.t") -> TieringAssignment:
        answer = self.service.claim_tiering("test", tables=[path], force=True)
        assert isinstance(answer, TieringAssignment), answer
        return answer

    def round(
        self,
        assignment: TieringAssignment | None = None,
        *,
        checkpoint: Callable[[str], None] = lambda _: None,
        **more: Any,
    ) -> TieringRound:
        """A round by a worker of its own."""
        return TieringRound(
            client=self.service,
            lake=self.lake(),
            runner=self.runner,
            assignment=assignment or self.claim(),
            checkpoint=checkpoint,
            **more,
        )

    def tier(self, path: str = "db.t") -> RoundResult:
        """Run one whole round."""
        return self.round(self.claim(path)).run()

    def worker(self, **more: Any) -> TieringService:
        return TieringService(client=self.service, lake=self.lake(), runner=self.runner, **more)

    def lake_table(self, path: str = "db.t") -> Table:
        """The lake table as stock pyiceberg has it."""
        if self._judge is None:
            properties = {**self.catalog.properties, "type": "sql"}
            properties.pop("py-catalog-impl", None)
            judge = load_catalog(self.catalog.name, **properties)
            assert isinstance(judge, SqlCatalog)
            self._judge = judge
        return self._judge.load_table(tuple(path.split(".")))

    def addresses(self, path: str = "db.t") -> list[tuple[int, int]]:
        """(bucket, offset) of every row in the lake, sorted; a row twice is there twice."""
        found = self.lake_table(path).scan(selected_fields=("__bucket", "__offset")).to_arrow()
        return sorted(
            zip(found["__bucket"].to_pylist(), found["__offset"].to_pylist(), strict=True)
        )

    def data_files(self, path: str = "db.t") -> list[Path]:
        """Every file in the lake table's data folder, referred to or not."""
        folder = self.folder / "warehouse" / Path(*path.split(".")) / "data"
        return sorted(folder.rglob("*.parquet"))

    def orphans(self, path: str = "db.t") -> list[Path]:
        """Data files that the current snapshot does not refer to."""
        live = {task.file.file_path for task in self.lake_table(path).scan().plan_files()}
        return [file for file in self.data_files(path) if f"file://{file}" not in live]

    def maintainer(self, **more: Any) -> Maintainer:
        """A new worker's maintainer."""
        filesystem = LakeFilesystem(self.catalog.properties)
        return Maintainer(pins=self.service, runner=self.runner, filesystem=filesystem, **more)

    def open(self, path: str = "db.t") -> IcebergLakeTable:
        """The lake table as a worker opens it."""
        state = self.service.table_state(path)
        return self.lake().open_or_create(state.table, state.lake)

    def maintain(
        self,
        maintainer: Maintainer | None = None,
        *,
        path: str = "db.t",
        policy: MaintenancePolicy | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> MaintenanceReport:
        """Maintain as a worker does that holds the table's newest claim."""
        state = self.service.table_state(path)
        claim = Claim(
            epoch=state.lake.tiering_epoch, snapshot_id=state.lake.snapshot_id, check=check
        )
        chosen = maintainer or self.maintainer()
        return chosen.maintain(self.open(path), state.table, claim, policy=policy)

    def policy(self, path: str = "db.t") -> MaintenancePolicy:
        """What the table's properties ask for, due or not."""
        return MaintenancePolicy.of(self.service.describe_table(path))

    def on_demand(self, path: str = "db.t") -> MaintenancePolicy:
        """The policy of `streamhouse maintain`."""
        return self.policy(path).on_demand()


class LogTieringWorld(TieringWorld):
    """Rows are known by their address; `deleted` are those that somebody deleted in the lake."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.deleted: set[Address] = set()

    def append(self, count: int, *, bucket: int = 0, path: str = "db.t") -> None:
        """Append rows whose ids are their offsets."""
        start = self.service.table_state(path).positions[bucket].high_watermark
        self.service.append(path, bucket, rows(start, count))

    def tier_rows(self, count: int, *, bucket: int = 0, path: str = "db.t") -> RoundResult:
        """Append rows and move them into the lake in a round of their own."""
        self.append(count, bucket=bucket, path=path)
        return self.tier(path)

    def delete(self, *addresses: Address, path: str = "db.t") -> None:
        """Delete rows as a foreign engine does: one position delete file a data file."""
        table = self.lake_table(path)
        files = []
        for task in table.scan().plan_files():
            found = self._addresses_in(task.file.file_path)
            positions = [n for n, address in enumerate(found) if address in addresses]
            if positions:
                pairs = [(task.file.file_path, n) for n in positions]
                files.append(position_delete_file(table, pairs, partition=task.file.partition))
        commit_delete_files(table, files)
        self.deleted.update(addresses)

    def expected(self, path: str = "db.t") -> list[Address]:
        """The addresses of all rows that were tiered and not deleted."""
        tiered = self.service.table_state(path).lake.tiered_offsets
        every = {(bucket, n) for bucket, end in tiered.items() for n in range(end)}
        return sorted(every - self.deleted)

    def check(self, path: str = "db.t") -> None:
        """Raise unless stock pyiceberg finds every row once, with its own values."""
        found = self.lake_table(path).scan().to_arrow()
        self.check_addresses(path)
        assert found["id"].to_pylist() == found["__offset"].to_pylist()
        names = [None if i % 3 == 0 else f"n{i}" for i in found["id"].to_pylist()]
        assert found["name"].to_pylist() == names

    def check_addresses(self, path: str = "db.t") -> None:
        """Raise unless stock pyiceberg finds every row once."""
        assert self.addresses(path) == self.expected(path)

    def _addresses_in(self, uri: str) -> list[Address]:
        found = pq.read_table(uri.removeprefix("file://"), columns=["__bucket", "__offset"])
        return list(zip(found["__bucket"].to_pylist(), found["__offset"].to_pylist(), strict=True))


class KeyTieringWorld(TieringWorld):
    """One primary key table `db.t`; `rows` is what it holds, by key, `live` also by address."""

    PATH = "db.t"

    def create_key_table(
        self,
        schema: pa.Schema = KEY_SCHEMA,
        *,
        primary_key: Sequence[str] = ("id",),
        bucket_count: int = 1,
        bucket_key: Sequence[str] = (),
        partitioned_by: Sequence[str] = (),
        properties: dict[str, str] | None = None,
    ) -> TableInfo:
        self.info = self.create_table(
            self.PATH,
            schema,
            primary_key=primary_key,
            bucket_count=bucket_count,
            bucket_key=bucket_key,
            partitioned_by=partitioned_by,
            properties=properties,
        )
        merge = self.info.descriptor.merge_rules()
        self.buckets = [
            KvModel(self.info.schema, self.info.descriptor.primary_key, merge)
            for _ in range(bucket_count)
        ]
        return self.info

    def upsert(self, *rows: Row) -> None:
        self.change([("upsert", row) for row in rows])

    def delete(self, *keys: Row) -> None:
        self.change([("delete", key) for key in keys])

    def change(self, changes: Sequence[Change], columns: Sequence[str] | None = None) -> None:
        """Apply changes in order; each bucket's go to its log as one batch."""
        by_bucket: dict[int, list[Change]] = defaultdict(list)
        if changes:
            for bucket, change in zip(self._buckets_of(changes), changes, strict=True):
                by_bucket[bucket].append(change)
        for bucket, members in by_bucket.items():
            entries = self.buckets[bucket].apply(members, columns)
            if entries:
                self.service.append(self.PATH, bucket, self._batch(entries))

    def _buckets_of(self, changes: Sequence[Change]) -> list[int]:
        key = self.info.descriptor.effective_bucket_key
        schema = self.info.schema.select(key, table=self.PATH).to_arrow()
        columns = [pa.array([row[f.name] for _, row in changes], f.type) for f in schema]
        keys = pa.RecordBatch.from_arrays(columns, schema=schema)
        return buckets_for_rows(keys, key, self.info.bucket_count).tolist()

    def _batch(self, entries: Sequence[Entry]) -> pa.RecordBatch:
        schema = self.info.log_schema
        columns = [
            pa.array([entry.row[name] for entry in entries], schema.field(name).type)
            for name in self.info.schema.names
        ]
        columns += [
            pa.array([entry.change_type for entry in entries], pa.int8()),
            pa.array([entry.retracts for entry in entries], pa.int64()),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    @property
    def rows(self) -> dict[Any, Row]:
        """What the table holds, by key."""
        return {key: row for model in self.buckets for key, (_, row) in model.rows.items()}

    @property
    def live(self) -> list[Any]:
        """(bucket, offset, row) of what the table holds, comparable."""
        return sorted(
            (bucket, offset, identity(row))
            for bucket, model in enumerate(self.buckets)
            for offset, row in model.rows.values()
        )

    def in_lake(self, snapshot_id: int | None = None) -> list[Any]:
        """What `live` was when `snapshot_id` was tiered, as stock pyiceberg reads the lake."""
        if self.service.table_state(self.PATH).lake.snapshot_id is None:
            return []
        found = self.lake_table(self.PATH).scan(snapshot_id=snapshot_id).to_arrow().to_pylist()
        return sorted(_addressed(row) for row in found)

    @property
    def changes(self) -> list[Any]:
        """(bucket, offset, change type, row) of every change there ever was, comparable."""
        return sorted(
            (bucket, entry.offset, CHANGE_TYPE_NAMES[entry.change_type], identity(entry.row))
            for bucket, model in enumerate(self.buckets)
            for entry in model.log
        )

    def history(self) -> list[Any]:
        """What `changes` was at the last round, as stock pyiceberg reads the full history."""
        found = self.lake_table(f"{self.PATH}$changelog").scan().to_arrow().to_pylist()
        return sorted(
            (bucket, offset, row_type, row)
            for line in found
            for row_type in [line.pop("__change_type")]
            for bucket, offset, row in [_addressed(line)]
        )

    @property
    def lag(self) -> int:
        """How many changes the service thinks are not in the lake."""
        positions = self.service.table_state(self.PATH).positions.values()
        return sum(p.high_watermark - p.tiered_offset for p in positions)

    def catch_up(self) -> None:
        """Run rounds until the lake has everything."""
        while self.lag:
            self.tier(self.PATH)


def _addressed(row: Mapping[str, Any]) -> Any:
    values = dict(row)
    values.pop("__timestamp")
    return values.pop("__bucket"), values.pop("__offset"), identity(values)
