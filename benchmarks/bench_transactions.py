"""Transactions of 10 M rows against direct writes, and what others notice of their commit."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pyarrow as pa

from benchmarks.harness import SCHEMA, make_rows, percentile, report
from streamhouse.client import StorageClient
from tests.support.service_process import ServiceProcess

ROWS: Final = int(os.environ.get("BENCH_TRANSACTION_ROWS", "10000000"))
KEYED_ROWS: Final = ROWS // 5
TASK_ROWS: Final = 250_000
BUCKETS: Final = 4
WRITERS: Final = 4
NO_LAKE: Final = {"table.datalake.enabled": "false"}


def main() -> None:
    """Report the time of transactions against direct writes, and the pauses of others."""
    tasks = [make_rows(TASK_ROWS, first_id=i * TASK_ROWS) for i in range(8)]
    with (
        tempfile.TemporaryDirectory() as directory,
        ServiceProcess(directory) as service,
        StorageClient(service.endpoint, timeout_s=120) as client,
    ):
        client.create_table("other", SCHEMA, properties=NO_LAKE)
        client.create_table("lookups", SCHEMA, primary_key=("id",), properties=NO_LAKE)
        client.upsert("lookups", make_rows(10_000))
        _log_table(client, tasks)
        _key_table(client, tasks)
        _small_commits(client)


def _log_table(client: StorageClient, tasks: list[pa.RecordBatch]) -> None:
    for name in ("warm", "direct", "staged", "mixed"):
        client.create_table(name, SCHEMA, bucket_count=BUCKETS, properties=NO_LAKE)
    client.append("warm", tasks[0])
    direct = _spread(ROWS, lambda i: client.append("direct", tasks[i % len(tasks)]))
    batches = [tasks[i % len(tasks)] for i in range(ROWS // TASK_ROWS)]
    staging, commit = _transact(client, "staged", batches)
    seconds = staging + commit
    pauses = _Pauses(client, table="mixed")
    _transact(client, "mixed", batches)
    pauses.stop()
    report(
        f"transaction of {ROWS:,} rows to {BUCKETS} buckets, staged by {WRITERS}, then committed",
        measured=f"{seconds:.1f} s (staging {staging:.1f} s, commit {commit:.1f} s)",
        limit=f"direct appends of the same rows: {direct:.1f} s",
        ratio=seconds / direct,
        bar="at most 2.5: everything is written twice",
        reached=seconds / direct <= 2.5,
    )
    pauses.report(f"while {ROWS:,} rows are staged and committed to a log table")


def _key_table(client: StorageClient, tasks: list[pa.RecordBatch]) -> None:
    for name in ("direct_rows", "staged_rows", "mixed_rows"):
        client.create_table(
            name, SCHEMA, bucket_count=BUCKETS, primary_key=("id",), properties=NO_LAKE
        )

    def rows(number: int) -> pa.RecordBatch:
        # The second half updates the first.
        task = tasks[number % len(tasks)]
        first = (number % max(1, KEYED_ROWS // TASK_ROWS // 2)) * TASK_ROWS
        ids = pa.array(range(first, first + TASK_ROWS), pa.int64())
        return task.set_column(0, SCHEMA.field(0), ids)

    batches = [rows(number) for number in range(KEYED_ROWS // TASK_ROWS)]
    direct = _spread(KEYED_ROWS, lambda i: client.upsert("direct_rows", batches[i]))
    staging, commit = _transact(client, "staged_rows", batches)
    seconds = staging + commit
    pauses = _Pauses(client, table="mixed_rows")
    _transact(client, "mixed_rows", batches)
    pauses.stop()
    assert client.count("staged_rows") == client.count("direct_rows")
    report(
        f"transaction of {KEYED_ROWS:,} upserts to {BUCKETS} buckets, half of them updates",
        measured=f"{seconds:.1f} s (staging {staging:.1f} s, commit {commit:.1f} s)",
        limit=f"direct upserts of the same rows: {direct:.1f} s",
        ratio=seconds / direct,
        bar="at most 2.5",
        reached=seconds / direct <= 2.5,
    )
    pauses.report(f"while {KEYED_ROWS:,} upserts are staged and committed")


def _small_commits(client: StorageClient) -> None:
    """A micro-batch: what exactly-once costs."""
    client.create_table("micro", SCHEMA, bucket_count=BUCKETS, properties=NO_LAKE)
    rows = make_rows(1_000)
    direct: list[float] = []
    staged: list[float] = []
    for version in range(200):
        start = time.perf_counter()
        client.append("micro", rows)
        direct.append(time.perf_counter() - start)
        start = time.perf_counter()
        transaction = client.begin_transaction("micro", app_id="stream", version=version)
        transaction.commit([transaction.stage(rows)])
        staged.append(time.perf_counter() - start)
    more_ms = (percentile(staged, 0.5) - percentile(direct, 0.5)) * 1000
    report(
        "micro-batch of 1,000 rows as a transaction: begin, stage, commit, p50",
        measured=f"{percentile(staged, 0.5) * 1000:.1f} ms",
        limit=f"an append: {percentile(direct, 0.5) * 1000:.1f} ms",
        ratio=percentile(staged, 0.5) / percentile(direct, 0.5),
        bar="at most 20 ms more",
        reached=more_ms <= 20,
    )


def _transact(
    client: StorageClient, table: str, batches: list[pa.RecordBatch]
) -> tuple[float, float]:
    """Write all in one transaction; return the seconds of staging and of the commit."""
    operation = "upsert" if table.endswith("rows") else "append"
    transaction = client.begin_transaction(table, operation=operation)
    parts: dict[int, str] = {}

    def stage(number: int) -> None:
        parts[number] = transaction.stage(batches[number])

    staging = _spread(len(batches) * TASK_ROWS, stage)
    started = time.perf_counter()
    result = transaction.commit([parts[number] for number in sorted(parts)])
    assert result.row_count == len(batches) * TASK_ROWS
    return staging, time.perf_counter() - started


def _spread(row_count: int, work: Callable[[int], object]) -> float:
    """Do every task, by several threads; return the seconds."""
    start = time.perf_counter()
    with ThreadPoolExecutor(WRITERS) as executor:
        list(executor.map(work, range(row_count // TASK_ROWS)))
    return time.perf_counter() - start


class _Pauses:
    """Asks for small things over and over, each in a thread, and notes how long each takes."""

    def __init__(self, client: StorageClient, *, table: str) -> None:
        row = make_rows(1)
        key = pa.table({"id": [0]})
        self._calls: dict[str, Callable[[], object]] = {
            "append to another table": lambda: client.append("other", row),
            "lookup in another table": lambda: client.lookup("lookups", key),
            "positions of the same table": lambda: client.positions(table),
        }
        if table.endswith("rows"):
            self._calls["lookup in the same table"] = lambda: client.lookup(table, key)
        else:
            self._calls["append to the same table"] = lambda: client.append(table, row)
        self._seconds: dict[str, list[float]] = {name: [] for name in self._calls}
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(name,)) for name in self._calls]
        for thread in self._threads:
            thread.start()

    def _ask(self, name: str) -> None:
        while not self._is_over.is_set():
            start = time.perf_counter()
            self._calls[name]()
            self._seconds[name].append(time.perf_counter() - start)

    def stop(self) -> None:
        """Ask no more."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def report(self, when: str) -> None:
        """Report the longest wait of each kind; others' must be short."""
        for name, seconds in self._seconds.items():
            longest = max(seconds)
            is_same = name.endswith("the same table") and not name.startswith("positions")
            report(
                f"{name} {when}, longest of {len(seconds):,}",
                measured=f"{longest * 1000:.0f} ms",
                limit=f"p50 meanwhile: {percentile(seconds, 0.5) * 1000:.1f} ms",
                ratio=longest / percentile(seconds, 0.5),
                bar="waits for the commit" if is_same else "at most 250 ms",
                reached=is_same or longest <= 0.25,
            )


if __name__ == "__main__":
    main()
