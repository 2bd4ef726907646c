"""What writers asked for and what they were told: the history that stored rows are judged by."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["AppendLedger", "KeyLedger", "RowId", "SchemaLedger"]

RowId = tuple[int, int]
"""(writer, number): every row ever sent has its own."""


@dataclass
class AppendLedger:
    """Appends to one log table. Thread-safe.

    `acknowledged`: row -> the bucket and offset it was acknowledged at, -1 where that is not told,
    of the rows that no `take_acknowledged` has taken. `sent`: every row ever sent, and when it was
    sent first, in microseconds since 1970: the service's timestamp of the row is not below.
    """

    acknowledged: dict[RowId, tuple[int, int]] = field(default_factory=dict)
    sent: dict[RowId, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def sending(self, rows: Iterable[RowId]) -> None:
        """Note rows before they are sent."""
        now_us = time.time_ns() // 1000
        with self._lock:
            self.sent.update((row, now_us) for row in rows)

    def stored(self, places: Mapping[RowId, tuple[int, int]]) -> None:
        """Note an acknowledgement."""
        with self._lock:
            self.acknowledged.update(places)

    def take_acknowledged(self) -> dict[RowId, tuple[int, int]]:
        """Return what was acknowledged since the last time."""
        with self._lock:
            taken, self.acknowledged = self.acknowledged, {}
            return taken

    def untaken(self) -> set[RowId]:
        """Return the rows that `take_acknowledged` would, and leave them."""
        with self._lock:
            return set(self.acknowledged)

    def newest(self) -> int:
        """Return the highest number of a row ever sent, 0 before the first."""
        with self._lock:
            return max((number for _, number in self.sent), default=0)

    def sent_us(self, row: RowId) -> int:
        """Return when a row was sent first; an error for one that never was."""
        with self._lock:
            return self.sent[row]

    def unsent(self, rows: Iterable[RowId]) -> list[RowId]:
        """Return those of `rows` that nobody sent."""
        with self._lock:
            return [row for row in rows if row not in self.sent]


@dataclass
class KeyLedger:
    """Writes to one primary key table. Thread-safe; each key belongs to one writer.

    `known`: key -> version of the last acknowledged write, None once it was deleted.
    `open`: key -> version (None: a delete) of a write that is being sent.
    """

    known: dict[int, int | None] = field(default_factory=dict)
    open: dict[int, int | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def sending(self, versions: Mapping[int, int | None]) -> None:
        """Note a write before it is sent."""
        with self._lock:
            assert not self.open.keys() & versions.keys(), "a key has one writer"
            self.open.update(versions)

    def stored(self, versions: Mapping[int, int | None]) -> None:
        """Note an acknowledgement."""
        with self._lock:
            self.known.update(versions)
            for key in versions:
                del self.open[key]

    def allowed(self) -> dict[int, set[int | None]]:
        """Return the versions each key may have at this moment."""
        with self._lock:
            versions: dict[int, set[int | None]] = {key: {v} for key, v in self.known.items()}
            for key, version in self.open.items():
                versions.setdefault(key, {None}).add(version)
            return versions


@dataclass
class SchemaLedger:
    """Columns that come and go in one table. Thread-safe; one thread changes them.

    `there`: columns that were acknowledged as added, `gone`: as dropped; names are used once.
    Neither says anything of the columns a change is under way for.
    """

    there: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def changing(self, names: Iterable[str]) -> None:
        """Note a change before it is sent."""
        with self._lock:
            self.there.difference_update(names)

    def changed(self, *, gone: Iterable[str], come: Iterable[str]) -> None:
        """Note an acknowledgement."""
        with self._lock:
            self.there.update(come)
            self.gone.update(gone)

    def known(self) -> tuple[set[str], set[str]]:
        """Return what is surely there and what is surely not."""
        with self._lock:
            return set(self.there), set(self.gone)
