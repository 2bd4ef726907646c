"""`sequence.column` where the table keeps the row written last: rows must come in its order.

Nobody compares rows then: the order in which they are applied decides. A task checks its own rows
as they pass, in constant memory; the driver orders the tasks by what each of them had. So it is
the order that `DataFrame.orderBy` makes, and any other is refused before a row is applied.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.storage_service.errors import InvalidRequestError, SchemaMismatchError

__all__ = ["SequenceCheck", "SequenceSpan", "tasks_in_sequence"]


@dataclass(frozen=True, slots=True, order=True)
class SequenceSpan:
    """The smallest and the greatest value of one task's rows."""

    first: Any
    last: Any


class SequenceCheck:
    """Sees one task's rows pass; raises for the first one out of order."""

    def __init__(self, column: str, *, table: str) -> None:
        self._column = column
        self._table = table
        self._span: SequenceSpan | None = None

    @property
    def span(self) -> SequenceSpan | None:
        """What has passed so far; None before the first row."""
        return self._span

    def take(self, batch: pa.RecordBatch) -> None:
        """Check the rows of a batch that is not empty."""
        values = batch.column(self._column)
        if values.null_count:
            raise SchemaMismatchError(
                f"table '{self._table}': sequence column '{self._column}' must not be null, but"
                f" row {pc.index(values.is_null(), True).as_py()} is"
            )
        rises = pc.greater_equal(values.slice(1), values.slice(0, len(values) - 1))
        first, last = values[0].as_py(), values[-1].as_py()
        is_after = self._span is None or first >= self._span.last
        if not is_after or not pc.all(rises, min_count=0).as_py():
            raise _out_of_order(self._column, table=self._table)
        self._span = SequenceSpan(first if self._span is None else self._span.first, last)


def tasks_in_sequence(
    spans: Sequence[SequenceSpan | None], *, column: str, table: str
) -> list[int]:
    """Return the tasks that have rows in the order in which theirs must be applied.

    Raises `InvalidRequestError` when there is none, because the values of two tasks interleave.
    """
    found = sorted((span, task) for task, span in enumerate(spans) if span is not None)
    for (before, _), (after, _) in itertools.pairwise(found):
        if after.first < before.last:
            raise _out_of_order(column, table=table)
    return [task for _, task in found]


def _out_of_order(column: str, *, table: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"table '{table}' keeps the row written last, so for 'sequence.column' = '{column}' rows"
        f" must come in its order: write df.orderBy('{column}'), or a stream with"
        " streamhouse.connector.write_batch, or create the table with table.merge-engine ="
        f" versioned and table.merge-engine.versioned.ver-column = {column}"
    )
