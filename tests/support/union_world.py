"""A world for read tests: a log in memory, a real Iceberg lake in a folder, and the truth beside.

What the world does to a table (append, tier, expire, rewrite) never changes which rows it has;
`rows` is what every read must find, less what its time to live has taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
from pyiceberg.io.pyarrow import _dataframe_to_data_files

from streamhouse.client import StorageClient
from streamhouse.core.model.lake.facts import LakeCatalog, LakeRole
from streamhouse.core.model.table_state import TableState, TieringAssignment
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.reading.options.options import BATCH, ReadOptions, as_options, read_options
from streamhouse.reading.plan.batch_read import plan_batch_read
from streamhouse.reading.plan.pinned_table import TableScan, count_rows, read_table, scan_table
from streamhouse.reading.plan.scan_schema import output_columns
from streamhouse.reading.scan.split_reader import read_split
from streamhouse.reading.tail.round_planner import PlanLimits
from streamhouse.tiering.maintain._maintenance import Maintainer
from tests.support.foreign_deletes import commit_compaction
from tests.support.tiering_world import Killed, TieringWorld

__all__ = ["ModelRow", "Tiers", "UnionWorld", "read_layouts"]


# Positions in a manifest's data file (Iceberg's spec, manifests).
_LOWER_BOUNDS, _UPPER_BOUNDS = 10, 11

Address = tuple[int, int]
"""(bucket, offset)"""


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One row of the truth: its address, when it was written, and the user's values."""

    bucket: int
    offset: int
    timestamp_us: int
    values: tuple[Any, ...]


class UnionWorld:
    """One table `db.t`, both tiers, and the rows it must have. Closed by `with`."""

    PATH = "db.t"

    def __init__(self, folder: Path, *, catalog: LakeCatalog | None = None) -> None:
        self.tiering = TieringWorld(folder, catalog=catalog)
        self.rows: list[ModelRow] = []

    def __enter__(self) -> UnionWorld:
        return self

    def __exit__(self, *error: Any) -> None:
        self.tiering.__exit__(*error)

    @property
    def client(self) -> StorageClient:
        """The service, as code under test takes it."""
        return cast(StorageClient, self.tiering.service)

    def append(self, bucket: int, rows: pa.RecordBatch) -> None:
        """Append to one bucket, as one batch with one timestamp."""
        self.tiering.service.append(self.PATH, bucket, rows)
        log = self.tiering.service._table(self.PATH).batches[bucket][-1]
        values = zip(*(column.to_pylist() for column in log.data.columns), strict=True)
        self.rows += [
            ModelRow(bucket, log.base_offset + i, log.timestamp_us, row)
            for i, row in enumerate(values)
        ]

    def overwrite(self) -> None:
        """Let all rows there are be overwritten; what is appended next has replaced them."""
        self.tiering.service.overwrite(self.PATH)
        self.rows = []

    def expire_log(self, bucket: int, before: int) -> None:
        """Let retention take the log below `before`."""
        self.tiering.service.expire_log(self.PATH, bucket, before)

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
            pins=self.tiering.service,
            runner=self.tiering.runner,
            filesystem=LakeFilesystem(self.tiering.catalog.properties),
            checkpoint=checkpoint,
            clock_ms=lambda: now_ms,
        )
        claim = self.tiering.service.claim_tiering("test", tables=[self.PATH], include_idle=True)
        assert isinstance(claim, TieringAssignment)
        with contextlib.suppress(Killed):
            self.tiering.round(claim, maintainer=maintainer).run()
        self.tiering.service.release(self.PATH)

    def rewrite_lake(self, *, keep_bounds: bool = True, role: LakeRole = LakeRole.ROWS) -> None:
        """Compact all files of each partition into one, as a foreign engine does: no properties.

        Without `keep_bounds` the new files carry no column statistics.
        """
        table = self.tiering.lake_table(role.lake_name(self.PATH))
        rows = table.scan().to_arrow()
        new = list(_dataframe_to_data_files(table.metadata, rows, table.io))
        for file in new:
            if not keep_bounds:
                file._data[_LOWER_BOUNDS] = file._data[_UPPER_BOUNDS] = None
        commit_compaction(table, new)

    def expire_old_snapshots(self) -> None:
        """Expire every snapshot but the current one, as a foreign engine's maintenance does."""
        table = self.tiering.lake_table(self.PATH)
        current = table.metadata.current_snapshot_id
        old = [s.snapshot_id for s in table.metadata.snapshots if s.snapshot_id != current]
        if old:
            table.maintenance.expire_snapshots().by_ids(old).commit()

    def read(self, name: str = PATH, **options: Any) -> pa.Table:
        """Read without Spark, with options as `StreamhouseClient.read` takes them."""
        return read_table(self.client, _options(name, options))

    def scan(self, name: str = PATH, *, limit: int | None = None, **options: Any) -> TableScan:
        """Scan without Spark, with options as `StreamhouseClient.scan` takes them."""
        return scan_table(self.client, _options(name, options), limit=limit)

    def count(self, name: str = PATH, **options: Any) -> int:
        """Count without Spark, with options as `StreamhouseClient.count` takes them."""
        return count_rows(self.client, _options(name, options))

    def read_layouts(self, **options: Any) -> list[pa.Table]:
        """Read the rows with metadata from the layout the planner takes, and from the other one."""
        return read_layouts(self.client, self.state(), endpoint="http://memory", **options)

    def state(self) -> TableState:
        """One cut of the table."""
        return self.tiering.service.table_state(self.PATH)


class Tiers:
    """What happens to the tiers of a world's table between reads; no step changes its rows."""

    def __init__(self, world: UnionWorld, layouts: Sequence[dict[str, str]]) -> None:
        self.world = world
        self.layouts = layouts

    def nibble(self) -> None:
        """A round that moves few rows."""
        if self.lacks_rows():
            self.world.tiering.round(limits=PlanLimits(rows_max=7, key_bucket_rows_max=5)).run()

    def die(self, step: str) -> None:
        """A worker dies right after `step` of a round, if there is something for one to do.

        Its lease ends, and the table is for others to take.
        """

        def die(reached: str) -> None:
            if reached == step:
                raise Killed

        if self.lacks_rows() or self.world.state().has_overwritten_rows:
            with contextlib.suppress(Killed):
                self.world.tiering.round(checkpoint=die).run()
            self.world.tiering.service.release(self.world.PATH)

    def lay_out(self, number: int) -> None:
        """The table gets a batch layout, another one, or none."""
        self.world.tiering.service.change_layout(self.world.PATH, ({}, *self.layouts)[number])

    def expire(self, share: float) -> None:
        """Retention takes part of what every layout in the lake has."""
        state = self.world.state()
        reached = state.reached_offsets()
        for bucket, at in state.positions.items():
            tiered = max(reached[bucket] - at.log_start_offset, 0)
            self.world.expire_log(bucket, at.log_start_offset + round(tiered * share))

    def rewrite(self, keep_bounds: bool) -> None:
        """A foreign engine compacts what there is in the lake."""
        lake = self.world.state().lake
        if lake.snapshot_id is not None:
            self.world.rewrite_lake(keep_bounds=keep_bounds)
        if lake.batch is not None:
            self.world.rewrite_lake(keep_bounds=keep_bounds, role=LakeRole.BATCH)

    def lacks_rows(self) -> bool:
        """Whether there are rows that some layout in the lake does not have."""
        state = self.world.state()
        reached = state.reached_offsets()
        return any(at.high_watermark > reached[b] for b, at in state.positions.items())


def _options(name: str, options: dict[str, Any]) -> ReadOptions:
    given = as_options(options) | {"table": name, "endpoint": "http://memory"}
    return read_options(given, use=BATCH)


def read_layouts(client: StorageClient, state: TableState, **options: object) -> list[pa.Table]:
    """Read the rows with metadata from the layout the planner takes, and from the batch layout.

    `options` are those of `StreamhouseClient.read`. There is one table while the table has no
    batch layout that can be read.
    """
    path = str(state.table.path)
    given = {"endpoint": client.endpoint, "table": path, **options, "includeMetadata": True}
    read = read_options(as_options(given), use=BATCH)
    output = output_columns(
        state.table.schema, columns=read.columns, include_metadata=True, table=path
    )
    found = []
    for seen in (state, state.in_batch_layout()):
        if seen is not None:
            plan = plan_batch_read(client, seen, read, output)
            batches = [
                batch
                for split in plan.splits
                for batch in read_split(split, plan.context, client=client)
            ]
            found.append(pa.Table.from_batches(batches, schema=plan.context.output_schema))
    return found
