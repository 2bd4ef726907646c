"""The producers of this process: their order in each table, and locks for their batches."""

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
    """The producers of one table; the answers of `order` are first offsets."""

    def __init__(self) -> None:
        self.order: ProducerOrder[int] = ProducerOrder()
        self._turns = WeakValueDictionary[int, asyncio.Lock]()

    def turn(self, writer_id: int) -> asyncio.Lock:
        """Return the lock under which a writer's batches are stored in order of arrival.

        An unused lock disappears.
        """
        return self._turns.setdefault(writer_id, asyncio.Lock())


class Producers:
    """The producers of every table.

    A table returns from another shard or owner as a new object, because producers may have stored
    batches elsewhere.
    """

    def __init__(self) -> None:
        self._tables: WeakKeyDictionary[OpenTable, TableProducers] = WeakKeyDictionary()

    def of(self, table: OpenTable) -> TableProducers:
        """Return the producers of one table."""
        table_producers = self._tables.get(table)
        if table_producers is None:
            table_producers = self._tables[table] = TableProducers()
        return table_producers


class RefusedPlaces:
    """The temporarily refused batches of a connection, until stored.

    The table may be another object when the next batch is read, after a cancelled move or a return.
    Therefore a refusal outlives the table object, but only for as long as an answer travels:
    afterwards the producer has the refused batches stored first, here or elsewhere.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._first: dict[tuple[TablePath, int], tuple[RecordSequence, float]] = {}

    def note(self, path: TablePath, writer_id: int, sequence: RecordSequence) -> None:
        """Remember a refused batch, unless an earlier batch or a newer epoch is remembered."""
        first = self._first_refused(path, writer_id)
        if first is not None and (
            first.epoch > sequence.epoch
            or (first.epoch == sequence.epoch and first.is_before(sequence))
        ):
            return
        self._first[path, writer_id] = sequence, self._clock_s() + _REFUSED_S
        if len(self._first) > _REFUSED_MAX:
            del self._first[next(iter(self._first))]

    def check(self, path: TablePath, writer_id: int, sequence: RecordSequence) -> None:
        """Raise UnavailableError if an earlier batch has to be sent again first."""
        first = self._first_refused(path, writer_id)
        if first is not None and first.epoch == sequence.epoch and first.is_before(sequence):
            raise UnavailableError(
                f"the producer's records from {first.base} on were temporarily refused, and come"
                f" before the records from {sequence.base} on: send both again"
            )

    def stored(self, path: TablePath, writer_id: int, sequence: RecordSequence) -> None:
        """Forget a writer's refused batch, unless that batch comes after the stored batch."""
        first = self._first_refused(path, writer_id)
        if first is None or first.epoch != sequence.epoch or not sequence.is_before(first):
            self._first.pop((path, writer_id), None)

    def _first_refused(self, path: TablePath, writer_id: int) -> RecordSequence | None:
        first, until_s = self._first.get((path, writer_id), (None, 0.0))
        return first if self._clock_s() < until_s else None
