"""A process that writes to a primary key bucket until it kills itself at a chosen point.

    python -m tests.simulation.kv_crash_child <directory> <seed> <point>

Changes are made durable in a file of its own, `log`, before they are applied. Every life first
replays that file. `read_log` reads what a reader may rely on: whole entries only.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa

from streamhouse.storage_service.kv import rocksdb_store
from streamhouse.storage_service.kv.cache._row_cache import RowCache
from streamhouse.storage_service.kv.kv_tablet import KvOptions
from streamhouse.storage_service.kv.rocksdb_store import RocksdbStore
from tests.simulation.fate import Fate
from tests.support.kv_world import LoggedBucket, random_batch, random_keys, random_rules

OPTIONS = KvOptions(cache_bytes=1 << 20, backlog_rows=15)
_ENTRY = struct.Struct("<QQ")

# Where a life ends. Each is passed many times; which time is drawn.
POINTS = (
    "before the log",
    "half in the log",
    "in the log",
    "in memory",
    "between chunks",
    "between chunks, some of them durable",
    "before the run is sealed",
    "run sealed",
    "before a flush",
    "flushed",
)


def open_bucket(directory: Path, seed: int) -> LoggedBucket:
    """Open the bucket and replay its log."""
    rules = random_rules(Random(seed), {"table.changelog.image": ["full", "after"][seed % 2]})
    bucket = LoggedBucket(directory / "kv", rules, options=OPTIONS)
    bucket.log = read_log(directory)
    bucket.replay()
    return bucket


def read_log(directory: Path) -> list[tuple[int, pa.RecordBatch]]:
    """Return base offset and changes of every whole entry."""
    path = directory / "log"
    data = path.read_bytes() if path.exists() else b""
    found = []
    position = 0
    while position + _ENTRY.size <= len(data):
        base_offset, size = _ENTRY.unpack_from(data, position)
        body = data[position + _ENTRY.size : position + _ENTRY.size + size]
        if len(body) < size:
            break
        (batch,) = pa.ipc.open_stream(body).read_all().to_batches()
        found.append((base_offset, batch))
        position += _ENTRY.size + size
    return found


def _append(directory: Path, base_offset: int, changelog: pa.RecordBatch, *, share: float) -> None:
    """Make `share` of an entry durable; what a life before left unfinished is cut off."""
    whole = sum(_entry_bytes(base, batch) for base, batch in read_log(directory))
    entry = _entry(base_offset, changelog)
    with (directory / "log").open("ab") as file:
        file.truncate(whole)
        file.write(entry[: int(len(entry) * share)])
        file.flush()
        os.fsync(file.fileno())


def _entry(base_offset: int, changelog: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, changelog.schema) as writer:
        writer.write_batch(changelog)
    body = sink.getvalue().to_pybytes()
    return _ENTRY.pack(base_offset, len(body)) + body


def _entry_bytes(base_offset: int, changelog: pa.RecordBatch) -> int:
    return len(_entry(base_offset, changelog))


def _watch(fate: Fate) -> None:
    """Put points into the tablet's parts."""

    def after(owner: type, name: str, act: Callable[..., None]) -> None:
        real = getattr(owner, name)

        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = real(self, *args, **kwargs)
            act(self)
            return result

        setattr(owner, name, watched)

    rocksdb_store._CHUNK_ROWS = 4  # type: ignore[misc] - many chunks of few rows
    real_fill = rocksdb_store._fill

    def fill(*args: Any) -> None:
        fate.reach("between chunks")
        real_fill(*args)

    rocksdb_store._fill = fill
    after(RowCache, "put", lambda _: fate.reach("in memory"))
    after(RocksdbStore, "write", lambda _: fate.reach("before the run is sealed"))
    after(RocksdbStore, "seal", lambda _: fate.reach("run sealed"))
    if fate.point == "between chunks, some of them durable":
        _flush_between_chunks(fate)


def _flush_between_chunks(fate: Fate) -> None:
    """RocksDB makes a memtable durable when it likes, also within a run."""
    real = RocksdbStore.write

    def write(self: RocksdbStore, keys: pa.Array, values: pa.Array, *, marker: Any) -> None:
        database = self._db

        class Flushing:
            def write(self, *args: Any) -> None:
                database.write(*args)
                database.flush(wait=True)
                fate.reach("between chunks, some of them durable")

            def __getattr__(self, name: str) -> Any:
                return getattr(database, name)

        self._db = Flushing()  # type: ignore[misc]
        try:
            real(self, keys, values, marker=marker)
        finally:
            self._db = database  # type: ignore[misc]

    RocksdbStore.write = write  # type: ignore[method-assign]


def main(directory: Path, seed: int, point: str) -> None:
    """Live one life."""
    random = Random(f"{seed} {point} {len(read_log(directory))}")
    bucket = open_bucket(directory, seed)
    keys = random_keys(Random(seed), bucket.rules, 30)
    fate = Fate(point, random.randint(1, 6))
    _watch(fate)
    while True:
        planned = bucket.plan(random_batch(random, bucket.rules, keys, rows_max=12))
        fate.reach("before the log")
        if planned.changelog.num_rows:
            if point == "half in the log":
                _append(directory, planned.base_offset, planned.changelog, share=random.random())
                fate.reach(point)
            _append(directory, planned.base_offset, planned.changelog, share=1)
        fate.reach("in the log")
        bucket.apply(planned)
        if random.random() < 0.2:
            fate.reach("before a flush")
            bucket.tablet.flush()
            fate.reach("flushed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
