"""A world for tiering tests: a service in memory, a real Iceberg lake in a folder, real tasks.

It has tables of any kind. `LogTableWorld` and `KeyTableWorld` have one, and what it must hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table

from streamhouse.core.model.lake.facts import SERVICE_ID_PROPERTY, LakeCatalog
from streamhouse.core.model.partitioning import PartitionField
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.core.model.table_state import TieringAssignment
from streamhouse.lake.commits.committer import IcebergLakeTable
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.lake_tables import IcebergLake
from streamhouse.reading.tail.lake_task import run_split
from streamhouse.tiering.maintain._maintenance import Maintainer
from streamhouse.tiering.maintain._maintenance_policy import Claim, MaintenancePolicy
from streamhouse.tiering.maintain.maintenance_report import MaintenanceReport
from streamhouse.tiering.round._round import RoundResult, TieringRound
from streamhouse.tiering.worker._service import TieringService
from streamhouse.tiering.worker.thread_runner import ThreadRunner
from tests.support.fake_service import FakeService

__all__ = [
    "SCHEMA",
    "Killed",
    "TieringWorld",
    "dying_at",
    "lake_in_folder",
    "rows",
]

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


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
        self.run_split = functools.partial(run_split, open_log=lambda _: self.service)
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
