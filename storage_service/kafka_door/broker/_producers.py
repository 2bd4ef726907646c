"""What this process knows of producers: their order per table, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final
from weakref import WeakKeyDictionary, WeakValueDictionary

from streamhouse.core.errors import UnavailableError
from streamhouse.core.model.records.record_sequence import RecordSequence
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.kafka.sequences import ProducerOrder

__all__ = ["Producers", "RefusedPlaces", "TableProducers"]

_REFUSED_MAX: Final = 1_000
_REFUSED_S: Final = 5.0


class TableProducers:
    """The producers of one table: the answers are first offsets."""

    def __init__(self) -> None:
        self.order: ProducerOrder[int] = ProducerOrder()
        self._turns = WeakValueDictionary[int, asyncio.Lock]()

    def turn(self, writer_id: int) -> asyncio.Lock:
        """Return what a writer's batches are stored under, one at a time; who asks first is first.

        It is gone when nobody holds it or waits for it.
        """
        return self._turns.setdefault(writer_id, asyncio.Lock())


class Producers:
    """The producers of every table.

    A table that was away, in another shard or under another owner, is another object when it comes
    back: what was known of its producers may be wrong by then.
    """

    def __init__(self) -> None:
        self._tables: WeakKeyDictionary[OpenTable, TableProducers] = WeakKeyDictionary()

    def of(self, table: OpenTable) -> TableProducers:
        """Return those of one table."""
        known = self._tables.get(table)
        if known is None:
            known = self._tables[table] = TableProducers()
        return known


class RefusedPlaces:
    """The batches of one connection that were refused for now, and not yet stored.

    Their table may be another object by the time that what was sent behind them is read: one that
    was to move and has stayed, or has come back. So this outlives what a table knows, but only for
    as long as an answer is on its way: then who sent them has them stored here or elsewhere first.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._first: dict[tuple[TablePath, int], tuple[RecordSequence, float]] = {}

    def note(self, path: TablePath, writer_id: int, sequence: RecordSequence) -> None:
        """Remember a batch, unless one before it is remembered, or a newer epoch's."""
        first = self._known(path, writer_id)
        if first is not None and (
            first.epoch > sequence.epoch
            or (first.epoch == sequence.epoch and first.is_before(sequence))
        ):
            return
        self._first[path, writer_id] = sequence, self._clock_s() + _REFUSED_S
        if len(self._first) > _REFUSED_MAX:
            del self._first[next(iter(self._first))]

    def check(self, path: TablePath, writer_id: int, sequence: RecordSequence) -> None:
        """Raise UnavailableError if one before this batch is to be sent again first."""
        first = self._known(path, writer_id)
        if first is not None and first.epoch == sequence.epoch and first.is_before(sequence):
            raise UnavailableError(
                f"the producer's records from {first.base} on were refused for now, and come before"
                f" those from {sequence.base} on: send all of them again"
            )

    def stored(self, path: TablePath, writer_id: int, sequence: RecordSequence) -> None:
        """Forget what a writer had refused, unless that comes behind the batch that is stored."""
        first = self._known(path, writer_id)
        if first is None or first.epoch != sequence.epoch or not sequence.is_before(first):
            self._first.pop((path, writer_id), None)

    def _known(self, path: TablePath, writer_id: int) -> RecordSequence | None:
        first, until_s = self._first.get((path, writer_id), (None, 0.0))
        return first if self._clock_s() < until_s else None
