"""A write to a primary key table on its way: what is asked, what is planned for it, who waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from streamhouse.storage_service.engine.appended import Appended
from streamhouse.storage_service.errors import StreamhouseError
from streamhouse.storage_service.kv.plan.upsert_plan import PlannedWrite
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.model.changelog import OPERATION_DELETE

__all__ = ["KeyPart", "KeyRequest", "delete_of", "halves"]


def delete_of(bucket: int, keys: pa.RecordBatch, *, written_below: int | None = None) -> KeyWrite:
    """Return what deletes the rows of `keys`, given as rows of the key columns.

    With `written_below` only those that have a version below that offset when it is their turn.
    """
    operations = np.full(keys.num_rows, OPERATION_DELETE, dtype=np.int8)
    versions = None if written_below is None else range(written_below)
    return KeyWrite(bucket, keys, operations, versions=versions)


def halves(write: KeyWrite) -> list[KeyWrite]:
    """Cut a write in two, unless it is one row; a `sequence` counts rows, up to the last one."""
    half = write.rows.num_rows // 2
    if half == 0:
        return [write]
    operations = write.operations
    left = None if operations is None else operations[:half]
    right = None if operations is None else operations[half:]
    position = write.sequence and write.sequence - (write.rows.num_rows - half)
    return [
        write._replace(rows=write.rows.slice(0, half), operations=left, sequence=position),
        write._replace(rows=write.rows.slice(half), operations=right),
    ]


@dataclass
class KeyPart:
    """What became of one request in one bucket; without `write` there is nothing to store.

    Several requests may have parts of one `write`.
    """

    bucket: int
    start: int
    end: int
    timestamp_us: int = 0
    write: PlannedWrite | None = None
    changes: RoutedBatch | None = None


@dataclass
class KeyRequest:
    """All of it happens or nothing; `parts` has one for each of `writes` once it is planned."""

    writes: Sequence[KeyWrite]
    columns: Sequence[str] | None
    writer_id: int
    done: asyncio.Future[Appended]
    is_published: bool = True
    """False: a piece of a transaction, which is published later and not with others."""
    parts: list[KeyPart] = field(default_factory=list)
    error: StreamhouseError | None = None
    timestamp_us: int = 0
    """When it was decided; 0: when it is stored."""

    @property
    def row_count(self) -> int:
        """How many rows it has."""
        return sum(write.rows.num_rows for write in self.writes)

    @property
    def numbered_buckets(self) -> set[tuple[int, int]]:
        """The (writer, bucket) pairs whose next sequences it uses."""
        return {(self.writer_id, w.bucket) for w in self.writes} if self.writer_id else set()
