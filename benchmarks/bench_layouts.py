"""Two layouts: what a filtered read gains by the batch layout, and what the copy costs.

The same rows, with a key in no order of time, are tiered in rounds into a table with a batch layout
sorted by the key and into one without. A read of 1 % of the key's range is answered from the layout
the planner takes, and from the stream-ordered one alone, in turns: before maintenance, when every
round's files still have the whole range, and after it.

A table that gets its layout late is filled from its lake files, round by round, as its log has lost
the rows: that is set against pyarrow reading the same files and writing one, without sorting.
"""

from __future__ import annotations

import gc
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.harness import SCHEMA, make_rows, median, pyarrow_rewrite_seconds, report
from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.core.model.table_state import TableState
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.reading.options.options import BATCH, as_options, read_options
from streamhouse.reading.plan.batch_read import plan_batch_read
from streamhouse.reading.plan.scan_schema import output_columns
from streamhouse.reading.scan.split_reader import read_split
from streamhouse.reading.tail.round_planner import PlanLimits
from streamhouse.tiering.maintain._maintenance import Claim, Maintainer, MaintenancePolicy
from tests.support.union_world import UnionWorld

ROUNDS = 10
ROUND_ROWS = 300_000
REPEATS = 7
SORTED_BY = {"table.datalake.batch-layout.sort": "id"}
GAIN_BAR = 5.0
LATE_BUCKETS = 4
LATE_FILE_ROWS = 250_000
LATE_FILES = 20
LATE_ROUND_ROWS = 1_250_000
LATE_REPEATS = 3
LATE_BAR = 0.4


def main() -> None:
    """Report gain and cost."""
    with tempfile.TemporaryDirectory() as folder, UnionWorld(Path(folder)) as world:
        plain_s = _fill(world, {})
    with tempfile.TemporaryDirectory() as folder, UnionWorld(Path(folder)) as world:
        both_s = _fill(world, SORTED_BY)
        _report_cost(world, plain_s=plain_s, both_s=both_s)
        _report_gain(world, "as the rounds left it")
        for role in (LakeRole.ROWS, LakeRole.BATCH):
            _maintain(world, role)
        _report_gain(world, "after maintenance")
    with tempfile.TemporaryDirectory() as folder, UnionWorld(Path(folder)) as world:
        _report_late_fill(world, Path(folder) / "limit.parquet")


def _fill(world: UnionWorld, properties: dict[str, str]) -> list[float]:
    """Tier the rows and return the seconds of each round."""
    world.tiering.create_table(world.PATH, SCHEMA, properties=properties)
    ids = np.random.default_rng(1).permutation(ROUNDS * ROUND_ROWS)
    seconds = []
    for number in range(ROUNDS):
        rows = make_rows(ROUND_ROWS, first_id=number * ROUND_ROWS)
        part = pa.array(ids[number * ROUND_ROWS : (number + 1) * ROUND_ROWS])
        world.tiering.service.append(world.PATH, 0, rows.set_column(0, SCHEMA.field("id"), part))
        assignment = world.tiering.claim()
        start_s = time.perf_counter()
        world.tiering.round(assignment).run()
        seconds.append(time.perf_counter() - start_s)
    # The first creates the lake tables and imports what it needs.
    return seconds[1:]


def _maintain(world: UnionWorld, role: LakeRole) -> None:
    state = world.state()
    known = state.lake if role is LakeRole.ROWS else state.lake.batch
    assert known is not None
    maintainer = Maintainer(
        pins=world.tiering.service,
        runner=world.tiering.runner,
        filesystem=LakeFilesystem(world.tiering.catalog.properties),
    )
    maintainer.maintain(
        world.tiering.lake().open_or_create(state.table, known, role=role),
        state.table,
        Claim(epoch=state.lake.tiering_epoch, snapshot_id=None),
        policy=MaintenancePolicy.of(state.table).on_demand(),
    )
    _use_newest(world, role)


def _use_newest(world: UnionWorld, role: LakeRole) -> None:
    """Tell the service's readers of the snapshot that maintenance left."""
    state = world.state()
    snapshot = world.tiering.lake_table(role.lake_name(world.PATH)).current_snapshot()
    assert snapshot is not None
    assert state.lake.batch is not None
    lake = replace(state.lake, snapshot_id=snapshot.snapshot_id)
    if role is LakeRole.BATCH:
        batch = replace(state.lake.batch, snapshot_id=snapshot.snapshot_id)
        lake = replace(state.lake, batch=batch)
    world.tiering.service.set_lake(world.PATH, lake)


def _report_gain(world: UnionWorld, when: str) -> None:
    state = world.state()
    stream_only = replace(state, lake=replace(state.lake, batch=None))
    width = ROUNDS * ROUND_ROWS // 100
    stream_s, chosen_s = [], []
    for repeat in range(REPEATS + 1):
        where = f"id >= {10 * width * (repeat + 1)} AND id < {(10 * (repeat + 1) + 1) * width}"
        for seen, seconds in ((stream_only, stream_s), (state, chosen_s)):
            gc.collect()
            start_s = time.perf_counter()
            rows = _read(world, seen, where)
            if repeat:
                seconds.append(time.perf_counter() - start_s)
            assert rows == width
    gain = median([slow / fast for slow, fast in zip(stream_s, chosen_s, strict=True)])
    report(
        f"filtered batch read of 1 % of the sort column's range, {when}",
        measured=f"batch layout: {median(chosen_s) * 1000:.0f} ms",
        limit=f"stream-ordered layout: {median(stream_s) * 1000:.0f} ms",
        ratio=gain,
        bar=f"at least {GAIN_BAR:g}",
        reached=gain >= GAIN_BAR,
    )


def _read(world: UnionWorld, state: TableState, where: str) -> int:
    """Plan and read on one thread; return the number of rows."""
    given = as_options({"where": where}) | {"table": world.PATH, "endpoint": "http://memory"}
    output = output_columns(
        state.table.schema, columns=None, include_metadata=False, table=world.PATH
    )
    plan = plan_batch_read(world.client, state, read_options(given, use=BATCH), output)
    return sum(
        batch.num_rows
        for split in plan.splits
        for batch in read_split(split, plan.context, client=world.client)
    )


def _report_cost(world: UnionWorld, *, plain_s: list[float], both_s: list[float]) -> None:
    sizes = {
        role: sum(
            task.file.file_size_in_bytes
            for task in world.tiering.lake_table(role.lake_name(world.PATH)).scan().plan_files()
        )
        for role in (LakeRole.ROWS, LakeRole.BATCH)
    }
    report(
        f"a batch layout: bytes of the copy, {ROUNDS * ROUND_ROWS / 1e6:.0f} M rows",
        measured=f"{sizes[LakeRole.BATCH] / 1e6:.1f} MB",
        limit=f"stream-ordered: {sizes[LakeRole.ROWS] / 1e6:.1f} MB",
        ratio=sizes[LakeRole.BATCH] / sizes[LakeRole.ROWS],
        bar="at most 1.5",
        reached=sizes[LakeRole.BATCH] <= 1.5 * sizes[LakeRole.ROWS],
    )
    report(
        f"a batch layout: time of a round of {ROUND_ROWS:,} rows",
        measured=f"both layouts: {median(both_s) * 1000:.0f} ms",
        limit=f"one layout: {median(plain_s) * 1000:.0f} ms",
        ratio=median(both_s) / median(plain_s),
        bar="at most 4",
        reached=median(both_s) <= 4 * median(plain_s),
    )


def _report_late_fill(world: UnionWorld, limit_path: Path) -> None:
    _fill_late_table(world)
    files = [path for path in world.tiering.data_files() if path.stat().st_size]
    assert len(files) == LATE_FILES
    row_count = LATE_FILES * LATE_FILE_ROWS
    ratios, seconds, limits = [], [], []
    for repeat in range(LATE_REPEATS + 1):
        limit_s = pyarrow_rewrite_seconds(files, limit_path)
        world.tiering.service.change_layout(world.PATH, SORTED_BY)
        gc.collect()
        start_s = time.perf_counter()
        rounds = 0
        while world.state().in_batch_layout() is None:
            world.tiering.round(limits=PlanLimits(rows_max=LATE_ROUND_ROWS)).run()
            rounds += 1
        fill_s = time.perf_counter() - start_s
        assert rounds == row_count // LATE_ROUND_ROWS
        assert (
            world.tiering.lake_table(LakeRole.BATCH.lake_name(world.PATH)).scan().count()
            == row_count
        )
        # Given back, it is filled anew. The first time it is made, too, and libraries are loaded.
        world.tiering.service.change_layout(world.PATH, {})
        if repeat:
            ratios.append(limit_s / fill_s)
            seconds.append(fill_s)
            limits.append(limit_s)
    report(
        f"a layout given to a table of {row_count / 1e6:.0f} M rows in {LATE_FILES} lake files:"
        f" filled in {row_count // LATE_ROUND_ROWS} rounds",
        measured=f"{row_count / median(seconds) / 1e6:.2f} M rows/s ({median(seconds):.1f} s)",
        limit="pyarrow reading and writing the same, not sorted:"
        f" {row_count / median(limits) / 1e6:.2f} M rows/s",
        ratio=median(ratios),
        bar=f"at least {LATE_BAR}",
        reached=median(ratios) >= LATE_BAR,
    )


def _fill_late_table(world: UnionWorld) -> None:
    """Tier the rows, one file a bucket and round, and let the log lose them."""
    world.tiering.create_table(world.PATH, SCHEMA, bucket_count=LATE_BUCKETS)
    ids = np.random.default_rng(1).permutation(LATE_FILES * LATE_FILE_ROWS)
    for number in range(LATE_FILES):
        start = number * LATE_FILE_ROWS
        part = pa.array(ids[start : start + LATE_FILE_ROWS])
        rows = make_rows(LATE_FILE_ROWS, first_id=start).set_column(0, SCHEMA.field("id"), part)
        bucket = number % LATE_BUCKETS
        world.tiering.service.append(world.PATH, bucket, rows)
        if bucket == LATE_BUCKETS - 1:
            world.tiering.round().run()
    for bucket, end in world.state().lake.tiered_offsets.items():
        world.tiering.service.expire_log(world.PATH, bucket, end)


if __name__ == "__main__":
    main()
