"""A world for read tests: a log in memory, a real Iceberg lake in a folder, and the truth beside.

What the world does to a table (append, tier, expire, rewrite) never changes which rows it has;
`rows` is what every read must find, less what its time to live has taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
from pyiceberg.io.pyarrow import _dataframe_to_data_files

from streamhouse.connector.options.options import BATCH, as_options, read_options
from streamhouse.connector.plan.union_read import read_table
from streamhouse.storage_service.client import LogBatch, StorageClient
from streamhouse.storage_service.errors import OffsetOutOfRangeError
from streamhouse.storage_service.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.storage_service.model.lake import LakeCatalog, LakeRole
from streamhouse.storage_service.model.lake_coverage import CoveredOffsets
from streamhouse.storage_service.model.offsets import BucketPositions
from streamhouse.storage_service.model.table_state import TableState, TieringAssignment
from streamhouse.tiering.maintain.maintenance import Maintainer
from tests.support.fake_tiering_service import FakeTieringService
from tests.support.layout_reads import read_layouts
from tests.support.tiering_world import Killed, TieringWorld

__all__ = ["FakeReadService", "ModelRow", "UnionWorld", "die_in_round"]


# Positions in a manifest's data file (Iceberg's spec, manifests).
_LOWER_BOUNDS, _UPPER_BOUNDS = 10, 11


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One row of the truth: its address, when it was written, and the user's values."""

    bucket: int
    offset: int
    timestamp_us: int
    values: tuple[Any, ...]


class FakeReadService(FakeTieringService):
    """The service in memory, with what reads ask of it beside what tiering asks."""

    def __init__(self, catalog: LakeCatalog) -> None:
        super().__init__(catalog)
        self.pins: dict[str, int] = {}
        self.questions = 0

    def check_lake_history(self, path: str, covered: CoveredOffsets) -> None:
        self.questions += 1
        self.compare_history(path, table_id=self._table(path).info.table_id, covered=covered)

    def pin_snapshot(self, path: str, snapshot_id: int, *, holder: str, ttl_s: float) -> None:
        self.pins[holder] = snapshot_id

    def unpin_snapshot(self, path: str, *, holder: str) -> None:
        self.pins.pop(holder, None)

    def table_state(
        self, path: str, *, after: Mapping[int, int] | None = None, max_wait_ms: int = 0
    ) -> TableState:
        return super().table_state(path)

    def positions(self, path: str) -> dict[int, BucketPositions]:
        return dict(self.table_state(path).positions)

    def offsets_for_timestamp(self, path: str, timestamp_us: int) -> dict[int, int]:
        """As the service: only what the log still holds counts."""
        table = self._table(path)
        found = {}
        for bucket, at in self.positions(path).items():
            late = [
                max(batch.base_offset, table.log_starts[bucket])
                for batch in table.batches[bucket]
                if batch.timestamp_us >= timestamp_us and batch.end_offset > at.log_start_offset
            ]
            found[bucket] = min(late, default=at.high_watermark)
        return found

    def read_range(
        self,
        path: str,
        bucket: int,
        start: int,
        end: int,
        *,
        columns: Sequence[str] | None = None,
        page_bytes: int = 0,
        schema_id: int | None = None,
    ) -> Iterator[LogBatch]:
        assert not schema_id, "the fake's tables never change their schema"
        at = self.positions(path)[bucket]
        if not at.log_start_offset <= start <= end <= at.high_watermark:
            raise OffsetOutOfRangeError(
                f"offset {start} of bucket {bucket} is outside [{at.log_start_offset},"
                f" {at.high_watermark}]"
            )
        for batch in super().read_range(path, bucket, start, end):
            data = batch.data if columns is None else batch.data.select(list(columns))
            yield LogBatch(
                bucket=bucket,
                base_offset=batch.base_offset,
                timestamp_us=batch.timestamp_us,
                data=data,
            )


class UnionWorld(TieringWorld):
    """One table `db.t`, both tiers, and the rows it must have."""

    PATH = "db.t"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.service: FakeReadService = FakeReadService(self.catalog)
        self.rows: list[ModelRow] = []

    @property
    def client(self) -> StorageClient:
        """The service, as code under test takes it."""
        return cast(StorageClient, self.service)

    def append(self, bucket: int, rows: pa.RecordBatch) -> None:
        """Append to one bucket, as one batch with one timestamp."""
        self.service.append(self.PATH, bucket, rows)
        log = self.service._table(self.PATH).batches[bucket][-1]
        values = zip(*(column.to_pylist() for column in log.data.columns), strict=True)
        self.rows += [
            ModelRow(bucket, log.base_offset + i, log.timestamp_us, row)
            for i, row in enumerate(values)
        ]

    def overwrite(self) -> None:
        """Let all rows there are be overwritten; what is appended next has replaced them."""
        self.service.overwrite(self.PATH)
        self.rows = []

    def expire_log(self, bucket: int, before: int) -> None:
        """Let retention take the log below `before`."""
        self.service.expire_log(self.PATH, bucket, before)

    def age_out(self, now_ms: int, death: tuple[str, int] | None = None) -> None:
        """Let a worker that has not seen the table before look after it at the time `now_ms`.

        With `death` it dies when it reaches that step for the n-th time.
        """
        reached: list[str] = []

        def checkpoint(step: str) -> None:
            reached.append(step)
            if death is not None and (step, reached.count(step)) == death:
                raise Killed

        maintainer = Maintainer(
            pins=self.service,
            runner=self.runner,
            filesystem=LakeFilesystem(self.catalog.properties),
            checkpoint=checkpoint,
            clock_ms=lambda: now_ms,
        )
        claim = self.service.claim_tiering("test", tables=[self.PATH], include_idle=True)
        assert isinstance(claim, TieringAssignment)
        with contextlib.suppress(Killed):
            self.round(claim, maintainer=maintainer).run()
        self.service.release(self.PATH)

    def rewrite_lake(self, *, keep_bounds: bool = True, role: LakeRole = LakeRole.ROWS) -> None:
        """Compact all files of each partition into one, as a foreign engine does: no properties.

        Without `keep_bounds` the new files carry no column statistics.
        """
        table = self.lake_table(role.lake_name(self.PATH))
        rows = table.scan().to_arrow()
        old = [task.file for task in table.scan().plan_files()]
        with table.transaction() as change, change.update_snapshot().overwrite() as rewrite:
            for file in old:
                rewrite.delete_data_file(file)
            for file in _dataframe_to_data_files(table.metadata, rows, table.io):
                if not keep_bounds:
                    file._data[_LOWER_BOUNDS] = file._data[_UPPER_BOUNDS] = None
                rewrite.append_data_file(file)

    def expire_old_snapshots(self) -> None:
        """Expire every snapshot but the current one, as a foreign engine's maintenance does."""
        table = self.lake_table(self.PATH)
        current = table.metadata.current_snapshot_id
        old = [s.snapshot_id for s in table.metadata.snapshots if s.snapshot_id != current]
        if old:
            table.maintenance.expire_snapshots().by_ids(old).commit()

    def read(self, name: str = PATH, **options: Any) -> pa.Table:
        """Read without Spark, with options as `StreamhouseClient.read` takes them."""
        given = as_options(options) | {"table": name, "endpoint": "http://memory"}
        return read_table(self.client, read_options(given, use=BATCH))

    def read_layouts(self, **options: Any) -> list[pa.Table]:
        """Read the rows with metadata from the layout the planner takes, and from the other one."""
        return read_layouts(self.client, self.state(), endpoint="http://memory", **options)

    def state(self) -> TableState:
        """One cut of the table."""
        return self.service.table_state(self.PATH)


def die_in_round(world: UnionWorld, step: str) -> None:
    """Let a worker die right after `step` of a round, if there is something for one to do."""

    def die(reached: str) -> None:
        if reached == step:
            raise Killed

    state = world.state()
    reached = state.reached_offsets()
    lacks_rows = any(at.high_watermark > reached[b] for b, at in state.positions.items())
    if lacks_rows or state.has_overwritten_rows:
        with contextlib.suppress(Killed):
            world.round(checkpoint=die).run()
        world.service.release(world.PATH)
