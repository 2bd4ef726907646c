"""What all benchmarks share: the rows they move, how they repeat, how they report.

A benchmark is a module `benchmarks/bench_*.py` that calls `report` once a figure when run with
`python -m benchmarks.bench_x`. `python -m benchmarks.run` runs them all into RESULTS.md.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from streamhouse.lake.files.parquet_writer import FileFormat, open_parquet

__all__ = [
    "SCHEMA",
    "Result",
    "changing_calls",
    "family_cpu_seconds",
    "fsynced_write_seconds",
    "make_rows",
    "median",
    "percentile",
    "process_cpu_seconds",
    "processor_rate",
    "pyarrow_rewrite_seconds",
    "report",
    "timed",
    "wait_until_idle",
]

RESULT_PREFIX: Final = "RESULT "

SCHEMA: Final = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("customer", pa.string()),
        pa.field("amount", pa.float64()),
        pa.field("ts", pa.timestamp("us", tz="UTC")),
        pa.field("status", pa.string()),
    ]
)
_STATUSES: Final = pa.array(["new", "paid", "packed", "shipped", "returned"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One figure: what was measured, the limit of the same run, their ratio, the bar to reach.

    `reached` is None where nothing was there to judge by.
    """

    name: str
    measured: str
    limit: str
    ratio: float
    bar: str
    reached: bool | None


def make_rows(row_count: int, *, first_id: int = 0, seed: int = 0) -> pa.RecordBatch:
    """Return rows of SCHEMA: 12-character customers, one event a millisecond, five statuses."""
    rng = np.random.default_rng(seed + first_id)
    ids = np.arange(first_id, first_id + row_count)
    customers = np.char.add(
        "cust", np.char.zfill(rng.integers(0, 100_000, row_count).astype(str), 8)
    )
    return pa.RecordBatch.from_arrays(
        [
            pa.array(ids),
            pa.array(customers.tolist()),
            pa.array(rng.random(row_count) * 1_000),
            pa.array(1_700_000_000_000_000 + ids * 1_000, pa.timestamp("us", tz="UTC")),
            _STATUSES.take(pa.array(rng.integers(0, 5, row_count))),
        ],
        schema=SCHEMA,
    )


def changing_calls(
    base: pa.RecordBatch, *, row_count: int, call_count: int, seed: int
) -> list[pa.Table]:
    """Return calls of rows of `base`, to be repeated: each changes what the calls before it left.

    The second half of the calls has the keys of the first, with other amounts.
    """
    rng = np.random.default_rng(seed)
    amount = SCHEMA.get_field_index("amount")
    chosen = [
        base.take(pa.array(rng.choice(base.num_rows, row_count, replace=False)))
        for _ in range(call_count // 2)
    ]
    return [
        pa.Table.from_batches(
            [rows.set_column(amount, SCHEMA.field("amount"), pa.array(rng.random(row_count)))]
        )
        for _ in range(2)
        for rows in chosen
    ]


def timed(work: Callable[[], object]) -> float:
    """Return the seconds one call of `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def processor_rate(work: Callable[[], object], item_count: int, *, turns: int, calls: int) -> float:
    """Return how many items a second of this processor does, where one call does `item_count`.

    The median of some turns, each of as many calls; the call before them is not measured.
    """
    work()
    rates = []
    for _ in range(turns):
        start = time.process_time()
        for _ in range(calls):
            work()
        rates.append(calls * item_count / (time.process_time() - start))
    return median(rates)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of `values` lie."""
    return float(np.quantile(np.asarray(values), share))


def fsynced_write_seconds(path: Path, pieces: Sequence[bytes]) -> float:
    """Write `pieces` to a new file with one fdatasync after each; return the seconds."""
    start = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for piece in pieces:
            os.write(fd, piece)
            os.fdatasync(fd)
    finally:
        os.close(fd)
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def pyarrow_rewrite_seconds(files: Sequence[Path], target: Path) -> float:
    """Read Parquet files and write their rows as one, `target`, as lake files are written.

    Return the seconds; `target` is deleted.
    """
    settings = FileFormat()
    start_s = time.perf_counter()
    rows = pa.concat_tables([pq.read_table(path, partitioning=None) for path in sorted(files)])
    with (
        pa.OSFile(str(target), "wb") as sink,
        open_parquet(sink, rows.schema, settings, sample=rows) as writer,
    ):
        writer.write_table(rows, row_group_size=settings.row_group_rows)
    seconds = time.perf_counter() - start_s
    target.unlink()
    return seconds


def process_cpu_seconds(pid: int) -> float:
    """Return the processor time that another process has taken, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until_idle(pid: int) -> None:
    """Return when another process has taken no processor for a fifth of a second."""
    before = -1.0
    while (now := process_cpu_seconds(pid)) > before:
        before = now
        time.sleep(0.2)


def family_cpu_seconds() -> float:
    """Return the processor time of this process and all below it, also of those that ended."""
    times: dict[int, tuple[int, int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # ended meanwhile
            continue
        fields = text.rpartition(")")[2].split()
        times[int(stat.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    family = {os.getpid()}
    while more := {pid for pid, (parent, _) in times.items() if parent in family} - family:
        family |= more
    return sum(times[pid][1] for pid in family) / os.sysconf("SC_CLK_TCK")


def report(
    name: str, *, measured: str, limit: str, ratio: float, bar: str, reached: bool | None
) -> None:
    """Print one figure, for people and for `benchmarks.run`."""
    result = Result(
        name=name, measured=measured, limit=limit, ratio=round(ratio, 3), bar=bar, reached=reached
    )
    verdict = {True: "reached", False: "MISSED", None: "not judged"}[result.reached]
    print(f"{name}: {measured} against {limit}: ratio {ratio:.2f} ({bar}: {verdict})")
    print(RESULT_PREFIX + json.dumps(asdict(result)))
    sys.stdout.flush()


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)
