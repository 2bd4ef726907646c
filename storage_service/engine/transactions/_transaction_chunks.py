"""The rows of a transaction's parts, in order, in pieces committed one after the other.

A position counts the rows of the transaction in one bucket. Positions tell which rows were stored
before a crash, so a redo continues at the end of the log. Blocking.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.log.filesystem import Buffer
from streamhouse.storage_service.log.staged_part import OPERATION_COLUMN, StagedPart

__all__ = ["StagedRows", "chunks_of", "key_writes", "staged_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedRows:
    """A staged batch without its first `skipped` rows; `end` is the bucket's next position."""

    bucket: int
    payload: Buffer
    schema: pa.Schema
    row_count: int
    skipped: int
    end: int


def chunks_of(
    parts: Sequence[StagedPart], *, done: Mapping[int, int], bytes_max: int, rows_max: int
) -> Iterator[list[StagedRows]]:
    """Yield the rows of `parts` beyond the positions `done`, in chunks of one schema.

    Only a chunk of a single batch may exceed a limit.
    """
    chunk: list[StagedRows] = []
    rows = size = 0
    for staged in _beyond(parts, dict(done)):
        if chunk and (
            size + len(staged.payload) > bytes_max
            or rows + staged.row_count > rows_max
            or not staged.schema.equals(chunk[0].schema, check_metadata=True)
        ):
            yield chunk
            chunk, rows, size = [], 0, 0
        chunk.append(staged)
        rows += staged.row_count
        size += len(staged.payload)
    if chunk:
        yield chunk


def _beyond(parts: Sequence[StagedPart], done: dict[int, int]) -> Iterator[StagedRows]:
    positions: dict[int, int] = {}
    for part in parts:
        for batch in part.batches():
            start = positions.get(batch.bucket, 0)
            end = start + batch.row_count
            positions[batch.bucket] = end
            skipped = min(max(done.get(batch.bucket, 0) - start, 0), batch.row_count)
            if skipped < batch.row_count:
                yield StagedRows(
                    bucket=batch.bucket,
                    payload=batch.payload,
                    schema=part.schema,
                    row_count=batch.row_count - skipped,
                    skipped=skipped,
                    end=end,
                )


def staged_rows(parts: Sequence[StagedPart], bucket: int) -> Iterator[pa.RecordBatch]:
    """Yield the staged rows of one bucket, unchanged."""
    for part in parts:
        for batch in part.batches():
            if batch.bucket == bucket:
                yield _decoded(batch.payload, part.schema)


def key_writes(chunk: Sequence[StagedRows], *, rows_max: int) -> Iterator[list[KeyWrite]]:
    """Yield the changes of a chunk of a primary key table, about `rows_max` rows at a time.

    Each write has one bucket, and the position afterwards as its sequence.
    """
    by_bucket: dict[int, list[pa.RecordBatch]] = {}
    for staged in chunk:
        rows = _decoded(staged.payload, staged.schema).slice(staged.skipped)
        by_bucket.setdefault(staged.bucket, []).append(rows)
    ends = {staged.bucket: staged.end for staged in chunk}
    joined = {
        bucket: batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        for bucket, batches in by_bucket.items()
    }
    share = max(1, rows_max // max(len(joined), 1))
    first = 0
    while writes := [
        _write(bucket, rows.slice(first, share), start=ends[bucket] - rows.num_rows + first)
        for bucket, rows in joined.items()
        if first < rows.num_rows
    ]:
        yield writes
        first += share


def _decoded(payload: Buffer, schema: pa.Schema) -> pa.RecordBatch:
    try:
        return pa.ipc.read_record_batch(pa.py_buffer(payload), schema)
    except (pa.ArrowException, OSError) as error:
        raise CorruptDataError(f"a staged record batch is unreadable: {error}") from error


def _write(bucket: int, rows: pa.RecordBatch, *, start: int) -> KeyWrite:
    """Return the change of `rows`, starting at position `start`."""
    position = start + rows.num_rows
    if OPERATION_COLUMN not in rows.schema.names:
        return KeyWrite(bucket, rows, sequence=position)
    place = rows.schema.names.index(OPERATION_COLUMN)
    operations = np.asarray(rows.column(place).to_numpy(zero_copy_only=False), dtype=np.int8)
    return KeyWrite(bucket, rows.remove_column(place), operations, sequence=position)
