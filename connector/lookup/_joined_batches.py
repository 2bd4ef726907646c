"""The work of a task: batches of rows in, the same rows with the looked-up columns out.

While the joined rows of a window go to Spark, one thread asks for the uncached keys of the next
window. A task asks for a key once. The answer stays cached until the task ends, or for the plan's
`cache_ms`, within `cache_bytes`. So a row is never older than the task, or than `cache_ms`, and
every write from before the task is seen.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.connector.lookup._key_rows import KeyRows, Keys, Numbers
from streamhouse.connector.lookup._lookup_plan import INNER, LEFT, LookupPlan
from streamhouse.connector.lookup._row_source import KeyedRows, RowSource
from streamhouse.connector.lookup._row_values import RowValues
from streamhouse.connector.lookup._shared_tables import shared_by_executor
from streamhouse.connector.lookup._table_cut import PlannedTable
from streamhouse.core.errors import SchemaMismatchError
from streamhouse.core.model.casts.lossless import fitted, may_fit
from streamhouse.core.model.schema import type_name
from streamhouse.core.threads import Pool
from streamhouse.reading.options.connection import client_for
from streamhouse.reading.scan.split_reader import coalesce

__all__ = ["joined", "joined_structs", "joined_values", "looked_up_by"]

_WINDOW_ROWS: Final = 65_536
"""Rows whose keys are looked up at once; Spark's own batches have 10,000."""
_PIECE_BYTES: Final = 128 << 20
_MEMORIES_MAX: Final = 8


class _Window(NamedTuple):
    """Rows whose keys are being looked up; without `valid` no key is null."""

    batch: pa.RecordBatch
    valid: Numbers | None
    keys: Keys
    numbers: Numbers
    answer: Future[KeyedRows | KeyRows] | None
    asked_at_s: float


class _Matched(NamedTuple):
    """Rows, and their looked-up rows in `values`: `counts` rows from `starts` on."""

    batch: pa.RecordBatch
    values: RowValues
    starts: Numbers
    counts: Numbers


def looked_up_by(plan: LookupPlan) -> RowSource:
    """Return the source of rows for a task, with one connection of this process to the service."""
    client = client_for(plan.endpoint, plan.token)
    # Others have written, and a change of rows names positions that the driver was told.
    client.see_all_writes(plan.table)
    shared = shared_by_executor() if plan.may_write_files else None
    return RowSource(plan, client, PlannedTable(plan, client), shared=shared)


def joined(
    batches: Iterable[pa.RecordBatch],
    plan: LookupPlan,
    source: RowSource,
    *,
    window_rows: int = _WINDOW_ROWS,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows, in their order, with the looked-up columns at the end.

    A row without a match has nulls in these columns; an inner join drops the row.
    """
    for matched in _matched(batches, plan, source, window_rows=window_rows, clock=clock):
        yield from _pieces(matched, plan)


def joined_structs(
    batches: Iterable[pa.RecordBatch],
    plan: LookupPlan,
    source: RowSource,
    *,
    window_rows: int = _WINDOW_ROWS,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[pa.Array]:
    """Yield a struct per row, null without a match; keys are whole primary keys."""
    fields = [field.with_nullable(True) for field in plan.row_schema]
    for columns, is_absent in _columns(batches, plan, source, window_rows=window_rows, clock=clock):
        mask = pa.array(is_absent) if is_absent.any() else None
        yield pa.StructArray.from_arrays(columns, fields=fields, mask=mask)


def joined_values(
    batches: Iterable[pa.RecordBatch],
    plan: LookupPlan,
    source: RowSource,
    *,
    window_rows: int = _WINDOW_ROWS,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[pa.Array]:
    """Yield one value a row, of the plan's first column, null also without a match."""
    for columns, _ in _columns(batches, plan, source, window_rows=window_rows, clock=clock):
        yield columns[0]


def _columns(
    batches: Iterable[pa.RecordBatch],
    plan: LookupPlan,
    source: RowSource,
    *,
    window_rows: int,
    clock: Callable[[], float],
) -> Iterator[tuple[list[pa.Array], npt.NDArray[np.bool_]]]:
    """Yield the looked-up columns in pieces, and a flag for each row without a match."""
    for batch, values, starts, counts in _matched(
        batches, plan, source, window_rows=window_rows, clock=clock
    ):
        step = _piece_rows(values)
        for first in range(0, batch.num_rows, step):
            part = slice(first, first + step)
            is_absent = counts[part] == 0
            yield values.at(starts[part], is_absent), is_absent


def _matched(
    batches: Iterable[pa.RecordBatch],
    plan: LookupPlan,
    source: RowSource,
    *,
    window_rows: int = _WINDOW_ROWS,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[_Matched]:
    memory = _memory_of(plan, clock())
    with Pool("streamhouse-lookup", 1) as asking:
        waiting: _Window | None = None
        for batch in _windows(batches, window_rows):
            matched = None if waiting is None else _completed(waiting, memory)
            waiting = _started(batch, memory, plan, source, asking, clock())
            if matched is not None:
                yield matched
        if waiting is not None:
            yield _completed(waiting, memory)
    _keep(plan, memory)


def _windows(batches: Iterable[pa.RecordBatch], window_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the first batch alone, to learn the size of rows, and larger batches afterwards."""
    rows = (batch for batch in batches if batch.num_rows)
    first = next(rows, None)
    if first is not None:
        yield first
        yield from coalesce(rows, rows_max=window_rows)


def _started(
    batch: pa.RecordBatch,
    memory: _Memory,
    plan: LookupPlan,
    source: RowSource,
    asking: Pool,
    time_s: float,
) -> _Window:
    keys, valid = _keys_of(batch, plan)
    numbers = memory.usable(time_s).find(keys)
    is_unknown = numbers < 0
    answer = None
    if is_unknown.any():
        positions = np.flatnonzero(is_unknown)
        unknown = keys if len(positions) == len(keys) else keys.at(positions)
        answer = asking.submit(lambda: source.answer(unknown.distinct()))
    return _Window(batch, valid, keys, numbers, answer, time_s)


def _completed(window: _Window, memory: _Memory) -> _Matched:
    """Wait for the window's answer; return the window's rows with the cached rows of their keys."""
    numbers = window.numbers
    if window.answer is not None:
        memory.learn(window.answer.result(), window.asked_at_s)
        numbers = memory.rows.find(window.keys)
    if window.valid is not None:
        all_numbers = np.zeros(window.batch.num_rows, dtype=np.int64)
        all_numbers[window.valid] = numbers
        numbers = all_numbers
    return _Matched(window.batch, memory.rows.values, *memory.rows.runs(numbers))


def _keys_of(batch: pa.RecordBatch, plan: LookupPlan) -> tuple[Keys, Numbers | None]:
    """Return the keys of rows without nulls, and the positions of these rows if some have nulls."""
    arrays = [
        _as_key(batch.column(name), name, field, plan)
        for name, field in zip(plan.frame_columns, plan.key_schema, strict=True)
    ]
    if not any(array.null_count for array in arrays):
        return Keys(arrays), None
    is_valid = functools.reduce(pc.and_, [array.is_valid() for array in arrays])
    valid = np.flatnonzero(is_valid.to_numpy(zero_copy_only=False))
    return Keys(arrays).at(valid), valid


def _as_key(column: pa.Array, name: str, field: pa.Field, plan: LookupPlan) -> pa.Array:
    """Return values in the type of a key column; raise for the first value that does not fit."""
    if column.type == field.type:
        return column
    if not may_fit(column.type, field.type):
        raise SchemaMismatchError(
            f"table '{plan.table}': '{name}' does not fit its column '{field.name}', which is"
            f" {type_name(field.type)}: it is {type_name(column.type)}; cast it"
        )
    rows = pa.RecordBatch.from_arrays([column], names=[name])
    return fitted(rows, {name: field.type}, table=plan.table).column(0)


def _pieces(matched: _Matched, plan: LookupPlan) -> Iterator[pa.RecordBatch]:
    """Yield the joined rows, in batches that are not much larger than a window."""
    batch, values, starts, counts = matched
    is_inner = plan.how == INNER
    if plan.is_whole_key and batch.num_rows <= _piece_rows(values):
        is_absent = counts == 0
        if is_inner and is_absent.any():
            positions = np.flatnonzero(counts)
            batch, starts, is_absent = (
                batch.take(pa.array(positions)),
                starts[positions],
                is_absent[positions],
            )
        yield _joined(batch, values, starts, is_absent, plan)
        return
    lengths = counts if is_inner else np.maximum(counts, 1)
    ends = np.cumsum(lengths)
    step = min(_WINDOW_ROWS, _piece_rows(values))
    first = 0
    while first < len(ends):
        begun = int(ends[first - 1]) if first else 0
        # At least one row, however many it matches.
        last = max(int(np.searchsorted(ends, begun + step, side="right")), first + 1)
        part = lengths[first:last]
        row_numbers = np.repeat(np.arange(first, last), part)
        within = np.arange(len(row_numbers)) - np.repeat(np.cumsum(part) - part, part)
        piece = batch.take(pa.array(row_numbers))
        if len(row_numbers):
            yield _joined(
                piece, values, starts[row_numbers] + within, counts[row_numbers] == 0, plan
            )
        first = last


def _piece_rows(values: RowValues) -> int:
    """Return how many joined rows a piece may have, by the mean size of a row."""
    row_bytes = values.nbytes // max(int(values.rows.num_rows), 1) + 1
    return max(1, _PIECE_BYTES // row_bytes)


def _joined(
    batch: pa.RecordBatch,
    values: RowValues,
    positions: Numbers,
    is_absent: Any,
    plan: LookupPlan,
) -> pa.RecordBatch:
    if not plan.shows_columns:
        return batch
    is_inner = plan.how == INNER
    fields = [f if is_inner else f.with_nullable(True) for f in plan.row_schema]
    columns = [*batch.columns, *values.at(positions, is_absent)]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema([*batch.schema, *fields]))


# -- rows cached beyond a task ---------------------------------------------------------------------


class _Memory:
    """The cached rows of a plan's keys, bounded in bytes and, with `cache_ms`, in age."""

    def __init__(self, plan: LookupPlan, time_s: float) -> None:
        self._plan: Final = plan
        self._forget(time_s)

    def _forget(self, time_s: float) -> None:
        self.rows = KeyRows(self._plan.row_schema, has_runs=not self._plan.is_whole_key)
        self._since_s = time_s

    def usable(self, time_s: float) -> KeyRows:
        """Return the usable cached rows; the age of the oldest row is the age of all rows."""
        is_old = self._plan.cache_ms and (time_s - self._since_s) * 1000 >= self._plan.cache_ms
        if is_old or self.rows.nbytes > self._plan.cache_bytes:
            self._forget(time_s)
        return self.rows

    def learn(self, answer: KeyedRows | KeyRows, asked_at_s: float) -> None:
        """Add the answer to a request; `asked_at_s` is the time of the request."""
        if isinstance(answer, KeyRows):
            self.rows, self._since_s = answer, asked_at_s
        else:
            self.rows.add(answer.keys, answer.counts, answer.rows)


_memories: Final[dict[Any, _Memory]] = {}


def _plan_key(plan: LookupPlan) -> Any:
    # The process is part of the key because Spark forks its workers. Each task unpickles its own
    # plan, so plans compare by value.
    return os.getpid(), replace(plan, how=LEFT, frame_columns=())


def _memory_of(plan: LookupPlan, time_s: float) -> _Memory:
    """Return the cache of this process's earlier tasks, for this task alone, or an empty cache."""
    memory = _memories.pop(_plan_key(plan), None) if plan.cache_ms else None
    return _Memory(plan, time_s) if memory is None else memory


def _keep(plan: LookupPlan, memory: _Memory) -> None:
    """Leave the cache to later tasks of this process."""
    if plan.cache_ms:
        while len(_memories) >= _MEMORIES_MAX:
            del _memories[next(iter(_memories))]
        _memories[_plan_key(plan)] = memory
