"""Small pieces of waiting work, done together in a cheaper step.

A piece of work is done a few turns of the event loop later, which an idle loop reaches at once.
Waiting requests of all connections share a step; a lone request does not wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

__all__ = ["SharedWork"]

_I = TypeVar("_I")
_R = TypeVar("_R")
# A request that is in its socket now is read in the next turn, and begun in the turn after.
_TURNS: Final = 2
_Work: TypeAlias = Callable[[Sequence[_I]], Sequence[_R]]


class _Piece(NamedTuple, Generic[_I, _R]):
    item: _I
    share: float
    work: _Work[_I, _R]
    result: asyncio.Future[_R]


class SharedWork(Generic[_I, _R]):
    """Items are `_I`, results are `_R`. Event loop only."""

    was_shared = False
    """Whether the latest step had several items; the next step may then have several, too."""

    def __init__(self) -> None:
        # The waiting pieces by key, in order of arrival.
        self._waiting: dict[Hashable, deque[_Piece[_I, _R]]] = {}
        self._is_due = False

    def begin(
        self, key: Hashable, item: _I, *, share: float, work: _Work[_I, _R]
    ) -> asyncio.Future[_R]:
        """Return the future result of an item, computed by `work` together with other items.

        `work` gets several items of one key, and returns as many results. `share` is the item's
        part of the work of one turn; an item with a larger share than 1 is done alone.
        """
        result: asyncio.Future[_R] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(_Piece(item, share, work, result))
        self._go_on()
        return result

    def _go_on(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            self._schedule_step(_TURNS)

    def _schedule_step(self, turns: int) -> None:
        """Do a step after the next turn and `turns` more turns."""
        if turns:
            asyncio.get_running_loop().call_soon(self._schedule_step, turns - 1)
        else:
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        self._is_due = False
        pieces = self._next_pieces()
        self.was_shared = len(pieces) > 1
        self._go_on()
        try:
            values = pieces[0].work([piece.item for piece in pieces])
            for piece, value in zip(pieces, values, strict=True):
                if not piece.result.done():
                    piece.result.set_result(value)
        except Exception as error:  # noqa: BLE001 - all waiting requests get the bug
            for piece in pieces:
                if not piece.result.done():
                    piece.result.set_exception(error)

    def _next_pieces(self) -> list[_Piece[_I, _R]]:
        key = next(iter(self._waiting))
        waiting = self._waiting.pop(key)
        pieces = [waiting.popleft()]
        share = pieces[0].share
        while waiting and share + waiting[0].share <= 1:
            pieces.append(waiting.popleft())
            share += pieces[-1].share
        if waiting:
            # This key continues after the other keys.
            self._waiting[key] = waiting
        return pieces
