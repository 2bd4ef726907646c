"""A write to a primary key table on its way: what is asked, what is planned for it, who waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.storage_service.engine.appended import Appended
from streamhouse.storage_service.errors import StreamhouseError
from streamhouse.storage_service.kv.plan.upsert_plan import PlannedWrite
from streamhouse.storage_service.log.group_commit import PendingAppend
from streamhouse.storage_service.model.changelog import OPERATION_DELETE

__all__ = ["KeyPart", "KeyRequest", "KeyWrite", "delete_of", "halves"]


class KeyWrite(NamedTuple):
    """Changes of one request to one bucket. Without `operations` every row is an upsert.

    `row_numbers` say where the rows were in the request, for what is refused. With `written_below`
    they are deletes, of rows that have a version below that offset when it is their turn.
    """

    bucket: int
    rows: pa.RecordBatch
    operations: npt.NDArray[np.int8] | None = None
    sequence: int = 0
    row_numbers: npt.NDArray[np.int64] | None = None
    written_below: int | None = None


def delete_of(bucket: int, keys: pa.RecordBatch, *, written_below: int | None = None) -> KeyWrite:
    """Return what deletes the rows of `keys`, given as rows of the key columns."""
    operations = np.full(keys.num_rows, OPERATION_DELETE, dtype=np.int8)
    return KeyWrite(bucket, keys, operations, written_below=written_below)


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
    pending: PendingAppend | None = None


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
