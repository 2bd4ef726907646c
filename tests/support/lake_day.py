"""A day of one-minute rounds in a few minutes, and what became of the lake meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from streamhouse.tiering.round._round import TieringRound
from tests.support.key_table_world import KeyTableWorld
from tests.support.log_table_world import LogTableWorld
from tests.support.tiering_world import TieringWorld

__all__ = ["LakeDay", "live_day"]

BUCKETS = 2
ROWS = 20


@dataclass
class LakeDay:
    """What was measured after each round; file counts are those of the current snapshot."""

    commit_cpu_s: list[float] = field(default_factory=list)
    data_files: list[int] = field(default_factory=list)
    delete_files: list[int] = field(default_factory=list)
    snapshots: list[int] = field(default_factory=list)
    manifests: list[int] = field(default_factory=list)
    metadata_bytes: list[int] = field(default_factory=list)
    files_on_disk: list[int] = field(default_factory=list)


def live_day(world: LogTableWorld | KeyTableWorld, rounds: int, *, max_age: str) -> LakeDay:
    """Run the rounds of a day by one worker; a primary key table gets updates of older rows."""
    properties = {"table.datalake.snapshot.max-age": max_age}
    if isinstance(world, KeyTableWorld):
        world.create_key_table(bucket_count=BUCKETS, properties=properties)
    else:
        world.tiering.create_table(bucket_count=BUCKETS, properties=properties)
    tiering = world.tiering
    maintainer = tiering.maintainer()
    lake = tiering.lake()
    day = LakeDay()
    for number in range(rounds):
        _write(world, number)
        marks: dict[str, float] = {}

        def mark(step: str, marks: dict[str, float] = marks) -> None:
            marks[step] = time.thread_time()

        TieringRound(
            client=tiering.service,
            lake=lake,
            runner=tiering.runner,
            assignment=tiering.claim(),
            maintainer=maintainer,
            checkpoint=mark,
        ).run()
        day.commit_cpu_s.append(marks["committed"] - marks["files-written"])
        if number % 10 == 9 or number + 1 == rounds:
            _look(tiering, day)
    return day


def _write(world: LogTableWorld | KeyTableWorld, number: int) -> None:
    if not isinstance(world, KeyTableWorld):
        for bucket in range(BUCKETS):
            world.append(ROWS, bucket=bucket)
        return
    new = range(number * ROWS, number * ROWS + ROWS)
    updated = range(number * ROWS // 2, number * ROWS // 2 + ROWS // 2)
    rows = [{"id": i, "region": f"r{i % 3}", "amount": float(number)} for i in (*new, *updated)]
    world.upsert(*rows)


def _look(tiering: TieringWorld, day: LakeDay) -> None:
    table = tiering.lake_table()
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    totals = snapshot.summary.additional_properties
    day.data_files.append(int(totals["total-data-files"]))
    day.delete_files.append(int(totals["total-delete-files"]))
    day.snapshots.append(len(table.metadata.snapshots))
    day.manifests.append(len(snapshot.manifests(table.io)))
    metadata = Path(table.metadata_location.removeprefix("file://"))
    day.metadata_bytes.append(metadata.stat().st_size)
    folder = metadata.parent.parent
    day.files_on_disk.append(sum(path.is_file() for path in folder.rglob("*")))
