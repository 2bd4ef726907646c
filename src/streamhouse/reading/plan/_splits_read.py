"""Reading the splits of a plan in this process, side by side: Parquet decoding leaves the
interpreter free.

Invariants:
- no reader is more than one batch ahead for each thread, so memory does not grow with the table
- nothing is open and no thread runs once the iterator is closed, also at the end of the program
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Iterator
from typing import Final, Protocol

import pyarrow as pa

from streamhouse.client import StorageClient
from streamhouse.core.threads import NamedThread
from streamhouse.reading.plan._read_cut import ReadPlan
from streamhouse.reading.scan.scan import ScanContext, Split
from streamhouse.reading.scan.split_reader import read_split

__all__ = ["SplitReader", "read_splits", "stream_splits"]

_THREADS_MAX: Final = 8


class SplitReader(Protocol):
    """What reads one split: `read_split`."""

    def __call__(
        self, split: Split, context: ScanContext, *, client: StorageClient
    ) -> Iterator[pa.RecordBatch]: ...


def read_splits(
    client: StorageClient, plan: ReadPlan, *, read: SplitReader = read_split
) -> Iterator[pa.RecordBatch]:
    """Yield all rows in the order of the splits, once all are read."""
    by_split: dict[int, list[pa.RecordBatch]] = {}
    for number, batch in stream_splits(client, plan, read=read):
        by_split.setdefault(number, []).append(batch)
    for _, batches in sorted(by_split.items()):
        yield from batches


def stream_splits(
    client: StorageClient, plan: ReadPlan, *, read: SplitReader = read_split
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield batches as they come, each with the number of its split; the batches of a split are in
    order.
    """
    if len(plan.splits) == 1:
        for batch in read(plan.splits[0], plan.context, client=client):
            yield 0, batch
        return
    threads = min(_THREADS_MAX, os.cpu_count() or 1, len(plan.splits))
    if not threads:
        return
    readers = _Readers(client, plan, read, threads)
    # Threads that wait for a consumer would never end with the program.
    atexit.register(readers.close)
    try:
        yield from readers.batches()
    finally:
        readers.close()
        atexit.unregister(readers.close)


class _Readers:
    """Threads that read split after split; `_slots` is the number of batches that may wait."""

    def __init__(
        self, client: StorageClient, plan: ReadPlan, read: SplitReader, threads: int
    ) -> None:
        self._client = client
        self._context = plan.context
        self._read = read
        self._todo = iter(enumerate(plan.splits))
        self._is_closed = threading.Event()
        self._slots = threading.Semaphore(threads)
        # A batch, or that a thread has ended: because of an error, or with all splits.
        self._ready: queue.SimpleQueue[tuple[int, pa.RecordBatch] | BaseException | None] = (
            queue.SimpleQueue()
        )
        self._threads = [
            NamedThread("streamhouse-read", self._run, number=number) for number in range(threads)
        ]

    def batches(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        for thread in self._threads:
            thread.start()
        running = len(self._threads)
        while running:
            ready = self._ready.get()
            if ready is None:
                running -= 1
            elif isinstance(ready, BaseException):
                raise ready
            else:
                self._slots.release()
                yield ready

    def close(self) -> None:
        self._is_closed.set()
        self._slots.release(len(self._threads))
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self) -> None:
        try:
            # One step of an enumeration is one step for all threads.
            for number, split in self._todo:
                for batch in self._read(split, self._context, client=self._client):
                    self._slots.acquire()
                    if self._is_closed.is_set():
                        return
                    self._ready.put((number, batch))
            self._ready.put(None)
        except BaseException as error:  # noqa: BLE001 - it is raised where the rows are wanted
            self._ready.put(error)
