"""Reading a table that scatters each round over many files, against the same table compacted.

A primary key table of 48 months and 4 buckets: rounds a minute apart update random rows, so that
each writes a file to nearly every month and bucket, and deletes to as many. Reads are measured
after each round as the worker leaves the table, and at the end after `streamhouse maintain`: the
processor time of all threads, of our reader and of stock pyiceberg.
"""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.harness import median, report
from streamhouse.tiering.maintain._maintenance import Maintainer
from tests.support.key_table_world import KeyTableWorld

MONTHS = 48
BUCKETS = 4
KEYS = int(os.environ.get("BENCH_ROWS", "20000"))
UPDATES = KEYS // 10
ROUNDS = 12
MEASURED = 4
ROUND_S = 60
REPEATS = 3
BAR = 2.0
SHARE_BAR = 0.25

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("day", pa.date32(), nullable=False),
        pa.field("amount", pa.float64()),
    ]
)


def main() -> None:
    """Report how much longer reads take than of the compacted table, and what that costs."""
    with tempfile.TemporaryDirectory() as folder, KeyTableWorld(Path(folder)) as world:
        _measure(world)


def _measure(world: KeyTableWorld) -> None:
    world.create_key_table(
        SCHEMA,
        primary_key=("id", "day"),
        bucket_key=("id",),
        bucket_count=BUCKETS,
        partitioned_by=("months(day)",),
    )
    passed_s = 0.0
    maintainer = world.tiering.maintainer(monotonic_s=lambda: time.monotonic() + passed_s)
    rng = np.random.default_rng(7)
    _write(world, np.arange(KEYS), 0)
    readers: dict[str, Callable[[], pa.Table]] = {
        "our reader": world.union.read,
        "pyiceberg": lambda: world.tiering.lake_table().scan().to_arrow(),
    }
    under_updates: dict[str, list[float]] = {name: [] for name in readers}
    rounds_s, upkeep_s, files = [], [], []
    for number in range(ROUNDS):
        if number:
            _write(world, rng.choice(KEYS, UPDATES, replace=False), number)
        round_s, tidy_s = _round(world, maintainer)
        passed_s += ROUND_S
        if number >= ROUNDS - MEASURED:
            rounds_s.append(round_s)
            upkeep_s.append(tidy_s)
            files.append(_files(world))
            for name, read in readers.items():
                under_updates[name].append(_processor_s(read))
    rows = world.tiering.maintainer()
    while world.tiering.maintain(rows, policy=world.tiering.on_demand()).has_more:
        pass
    for name, read in readers.items():
        compacted_s = median([_processor_s(read) for _ in range(REPEATS)])
        ratio = median(under_updates[name]) / compacted_s
        report(
            f"{name}: {KEYS:,} rows of {MONTHS} months and {BUCKETS} buckets,"
            f" {UPDATES:,} updated a round",
            measured=f"{median(under_updates[name]):.2f} s of processor, {files[-1]} files",
            limit=f"compacted: {compacted_s:.2f} s, {_files(world)} files",
            ratio=ratio,
            bar=f"at most {BAR}",
            reached=ratio <= BAR,
        )
    share = sum(upkeep_s) / (ROUND_S * MEASURED)
    report(
        "maintenance of that table, of a core with a round a minute",
        measured=f"{sum(upkeep_s) / MEASURED:.2f} s of processor a round",
        limit=f"the rounds themselves: {sum(rounds_s) / MEASURED:.2f} s",
        ratio=share,
        bar=f"at most {SHARE_BAR}",
        reached=share <= SHARE_BAR,
    )
    assert world.union.read().num_rows == KEYS


def _write(world: KeyTableWorld, keys: np.ndarray, number: int) -> None:
    first = datetime.date(2020, 1, 1)
    world.upsert(
        *(
            {
                "id": key,
                "day": first + datetime.timedelta(days=key * 7919 % (MONTHS * 30)),
                "amount": float(number),
            }
            for key in keys.tolist()
        )
    )


def _round(world: KeyTableWorld, maintainer: Maintainer) -> tuple[float, float]:
    """Run a round; return the processor seconds of its rows, and of the maintenance behind them."""
    marks = {}

    def mark(step: str) -> None:
        marks[step] = time.process_time()

    start_s = time.process_time()
    world.tiering.round(maintainer=maintainer, checkpoint=mark).run()
    ended_s = time.process_time()
    # What is left of small rounds in the log would be read from there.
    for bucket, position in world.union.state().positions.items():
        world.union.expire_log(bucket, position.tiered_offset)
    return marks["committed"] - start_s, ended_s - marks["committed"]


def _processor_s(work: Callable[[], object]) -> float:
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


def _files(world: KeyTableWorld) -> str:
    snapshot = world.tiering.lake_table().current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    totals = snapshot.summary.additional_properties
    return f"{totals['total-data-files']} + {totals['total-delete-files']}"


if __name__ == "__main__":
    main()
