"""A table's rows without Spark: the existing rows, bucket by bucket in offset order, then live
rows.

Invariants:
- a log table yields the rows of its union read and all rows written since, each once; a primary key
  table yields the rows of one lake snapshot as `+I`, then every later change
- a token marks the end of its batch: after the token no row is missing and no row comes again
- all rows of a step are in memory before the first row is yielded, so a failed step is read again
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from streamhouse.client import StorageClient
from streamhouse.core.errors import (
    InvalidRequestError,
    OffsetOutOfRangeError,
    SnapshotNotFoundError,
)
from streamhouse.core.model.values.notebook import html_of_rows
from streamhouse.reading.follow.stream_position import StreamPosition
from streamhouse.reading.follow.table_follower import TableFollower, high_watermarks
from streamhouse.reading.options.options import STREAM, ReadOptions, ShapeOptions, read_options
from streamhouse.reading.plan._splits_read import read_splits
from streamhouse.reading.plan.row_form import shape_columns, stream_request
from streamhouse.reading.plan.scan_schema import SYSTEM_COLUMNS

__all__ = ["TableBatch", "subscribe_full"]

_logger = logging.getLogger(__name__)

STEP_ROWS_MAX: Final = 200_000
BATCH_ROWS_MAX: Final = 65_536
_WAIT_MS: Final = 10_000
_ATTEMPTS_MAX: Final = 5
_BUCKET, _OFFSET, _TIMESTAMP = (column.name for column in SYSTEM_COLUMNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableBatch:
    """Rows of one bucket of `table` in offset order; offsets have gaps where rows have gone.

    `timestamps` is when the service made each row durable. `token` is where the reader stands after
    this batch: a JSON object, to go on from with `subscribe(path, start=token)`.
    """

    bucket: int
    offsets: pa.Int64Array
    timestamps: pa.TimestampArray
    data: pa.RecordBatch
    token: Mapping[str, Any]
    table: str = ""

    def __repr__(self) -> str:
        return f"TableBatch('{self.table}', bucket {self.bucket}, {self.data.num_rows} rows)"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the first rows."""
        return html_of_rows(repr(self), self.data)


def subscribe_full(
    client: StorageClient,
    given: Mapping[str, str],
    *,
    token: Mapping[str, Any] | None,
    schema_id: int | None = None,
    step_rows_max: int = STEP_ROWS_MAX,
    wait_ms: int = _WAIT_MS,
) -> Generator[TableBatch, None, None]:
    """Follow a table from its first row, or from a token, for ever.

    `given` are options of a stream read. All errors of the options and of the token are raised
    here, not by the iterator.
    """
    options = read_options(given, use=STREAM)
    name = options.connection.name
    if name.part:
        raise InvalidRequestError(
            f"'{name}' cannot be subscribed to; subscribe to '{name.path}', whose rows it has"
        )
    state = client.table_state(str(name.path))
    state = state if schema_id is None else state.in_version(schema_id)
    shape = ShapeOptions(
        connection=options.connection,
        columns=options.columns,
        include_metadata=True,
        read_change_feed=None,
        is_stream=True,
    )
    output = shape_columns(state.table, shape)
    stream_request(state.table, options, output)
    follower = TableFollower(options, state, output, lambda: client)
    first = follower.start() if token is None else follower.position(token)
    first.check_not_beyond(high_watermarks(follower.state), table=follower.table)
    added = {_BUCKET, _OFFSET, _TIMESTAMP}.difference(options.columns or ())
    names = [column.name for column in output if column.name not in added]
    return _Subscription(client, options, follower, names, step_rows_max, wait_ms).run(first)


class _Subscription:
    """The steps of one subscription, and the batches of each step."""

    def __init__(
        self,
        client: StorageClient,
        options: ReadOptions,
        follower: TableFollower,
        names: Sequence[str],
        step_rows_max: int,
        wait_ms: int,
    ) -> None:
        self._client = client
        self._options = options
        self._follower = follower
        self._names = list(names)
        self._step_rows_max = step_rows_max
        self._wait_ms = wait_ms

    def run(self, position: StreamPosition) -> Generator[TableBatch, None, None]:
        """Yield the existing rows from `position` on, and all later rows."""
        try:
            self._follower.reached(position)
            while True:
                end = self._follower.next_end(
                    position.to_json(), rows_max=self._step_rows_max, max_wait_ms=self._wait_ms
                )
                if end == position:
                    continue
                position, end, rows = self._read(position, end)
                for batch, reached in self._batches(position, end, rows):
                    yield batch
                    self._follower.reached(reached)
                position = end
        finally:
            self._follower.close()

    def _read(
        self, start: StreamPosition, end: StreamPosition
    ) -> tuple[StreamPosition, StreamPosition, pa.Table]:
        """Return the rows from `start` to `end`, with both positions as they were during the read.

        Rows that leave their tier after the planning are looked up in the other tier.
        """
        for attempt in range(_ATTEMPTS_MAX):
            try:
                plan = self._follower.plan(start.to_json(), end.to_json())
                batches = read_splits(self._client, plan)
                return start, end, pa.Table.from_batches(batches, plan.context.output_schema)
            except (SnapshotNotFoundError, OffsetOutOfRangeError) as error:
                if attempt + 1 == _ATTEMPTS_MAX:
                    raise
                _logger.info("event=read_again table=%s why=%r", self._follower.table, str(error))
                start, end = self._follower.found_again(start, end, error)
        raise AssertionError("the last attempt returns or raises")

    def _batches(
        self, start: StreamPosition, end: StreamPosition, rows: pa.Table
    ) -> Iterator[tuple[TableBatch, StreamPosition]]:
        """Yield a step's rows, bucket after bucket by offset; each batch with its end position."""
        rows = _in_order(rows)
        reached = dict(start.offsets)
        count = rows.num_rows
        first = 0
        for bucket, last in _runs(rows.column(_BUCKET).to_numpy()):
            for part in rows.slice(first, last - first).to_batches(max_chunksize=BATCH_ROWS_MAX):
                first += part.num_rows
                offsets = part.column(_OFFSET)
                is_bucket_done = first == last
                reached[bucket] = end.offsets[bucket] if is_bucket_done else offsets[-1].as_py() + 1
                position = end if first == count else start.advanced(dict(reached))
                batch = TableBatch(
                    bucket=bucket,
                    offsets=offsets,
                    timestamps=part.column(_TIMESTAMP),
                    data=part.select(self._names),
                    token=position.to_json(),
                    table=self._follower.table,
                )
                yield batch, position
        if not count:
            self._follower.reached(end)


def _in_order(rows: pa.Table) -> pa.Table:
    """Return the rows by bucket and offset."""
    buckets = rows.column(_BUCKET).to_numpy()
    offsets = rows.column(_OFFSET).to_numpy()
    same = buckets[1:] == buckets[:-1]
    is_ordered = (buckets[1:] > buckets[:-1]) | (same & (offsets[1:] > offsets[:-1]))
    if is_ordered.all():
        return rows
    return rows.take(pa.array(np.lexsort((offsets, buckets))))


def _runs(values: np.ndarray[Any, np.dtype[np.int32]]) -> Iterator[tuple[int, int]]:
    """Yield each run of equal neighbours: the value, and the end of the run."""
    ends = [*(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    for end in ends if len(values) else ():
        yield int(values[end - 1]), end
