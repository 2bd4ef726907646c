"""Maintenance: what compaction costs, and a day of one-minute rounds that stays quick.

Compaction is set against pyarrow reading the same files and writing one, without committing
anything. The day is 1,440 rounds of a log table and of a primary key table, one after the other
without the minutes between; snapshots are kept for as long as about 60 rounds take, as the default
hour of one-minute rounds does.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.harness import SCHEMA, make_rows, median, pyarrow_rewrite_seconds, report
from tests.support.key_table_world import KeyTableWorld
from tests.support.lake_day import BUCKETS, LakeDay, live_day
from tests.support.log_table_world import LogTableWorld

FILES = 40
FILE_ROWS = 50_000
REPEATS = 5
ROUNDS = 1_440
SNAPSHOT_AGE = "3s"
COMPACTION_BAR = 0.4
COMMIT_BAR = 1.5


def main() -> None:
    """Report both."""
    _compaction()
    with tempfile.TemporaryDirectory() as folder, LogTableWorld(Path(folder)) as log_world:
        _report_day("log table", live_day(log_world, ROUNDS, max_age=SNAPSHOT_AGE))
        log_world.check_addresses()
    with tempfile.TemporaryDirectory() as folder, KeyTableWorld(Path(folder)) as key_world:
        _report_day("primary key table", live_day(key_world, ROUNDS, max_age=SNAPSHOT_AGE))
        assert key_world.in_lake() == key_world.live


def _compaction() -> None:
    ratios, rates, limits = [], [], []
    for repeat in range(REPEATS + 1):
        with tempfile.TemporaryDirectory() as folder, LogTableWorld(Path(folder)) as world:
            world.tiering.create_table(schema=SCHEMA)
            for number in range(FILES):
                rows = make_rows(FILE_ROWS, first_id=number * FILE_ROWS)
                world.tiering.service.append("db.t", 0, rows)
                world.tiering.tier()
            files = [path for path in world.tiering.data_files() if path.stat().st_size]
            maintainer, policy = world.tiering.maintainer(), world.tiering.on_demand()
            # Reading the manifests is part of it; importing is not.
            limit = (
                FILES * FILE_ROWS / pyarrow_rewrite_seconds(files, Path(folder) / "limit.parquet")
            )
            start_s = time.perf_counter()
            done = world.tiering.maintain(maintainer, policy=policy)
            rate = FILES * FILE_ROWS / (time.perf_counter() - start_s)
            assert done.rewritten is not None
            assert done.rewritten.rows == FILES * FILE_ROWS
            if repeat:
                ratios.append(rate / limit)
                rates.append(rate)
                limits.append(limit)
    report(
        f"compaction of {FILES} files with {FILES * FILE_ROWS / 1e6:.0f} M rows, commit included",
        measured=f"{median(rates) / 1e6:.2f} M rows/s",
        limit=f"pyarrow reading and writing the same: {median(limits) / 1e6:.2f} M rows/s",
        ratio=median(ratios),
        bar=f"at least {COMPACTION_BAR}",
        reached=median(ratios) >= COMPACTION_BAR,
    )


def _report_day(name: str, day: LakeDay) -> None:
    cpu = day.commit_cpu_s
    # The first rounds create the table and import what they need.
    first, last = median(cpu[5:65]), median(cpu[-60:])
    report(
        f"{name}: CPU of a commit, the last 60 of {len(cpu):,} rounds",
        measured=f"{last * 1000:.1f} ms",
        limit=f"the first 60: {first * 1000:.1f} ms",
        ratio=last / first,
        bar=f"at most {COMMIT_BAR}",
        reached=last <= COMMIT_BAR * first,
    )
    report(
        f"{name}: most data files a bucket on that day",
        measured=f"{max(day.data_files) / BUCKETS:.0f} files, {max(day.delete_files)} delete files",
        limit=f"{max(day.manifests)} manifests, {max(day.snapshots)} snapshots,"
        f" metadata {max(day.metadata_bytes) / 1e3:.0f} KB, {max(day.files_on_disk)} files on disk",
        ratio=max(day.data_files) / BUCKETS / len(cpu),
        bar="at most 40 files",
        reached=max(day.data_files) <= 40 * BUCKETS,
    )


if __name__ == "__main__":
    main()
