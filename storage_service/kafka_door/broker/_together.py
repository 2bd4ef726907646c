"""Small pieces of work that wait at the same time, done in one step: it costs less than many.

What has begun is done some turns of the event loop later, which a loop without work takes at once:
requests that wait anyway, of one connection or of many, are taken together, and one that comes
alone waits for nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

__all__ = ["SharedWork"]

_I = TypeVar("_I")
_R = TypeVar("_R")
# A request that its socket has by now is read in the next turn, and begun in the one after it.
_TURNS: Final = 2
_Work: TypeAlias = Callable[[Sequence[_I]], Sequence[_R]]


class _Piece(NamedTuple, Generic[_I, _R]):
    item: _I
    share: float
    work: _Work[_I, _R]
    done: asyncio.Future[_R]


class SharedWork(Generic[_I, _R]):
    """Items are `_I`, and what becomes of each is an `_R`. Event loop only."""

    was_shared = False
    """Whether the latest step was of several items: then the next one may be, too."""

    def __init__(self) -> None:
        # What may be done together, by its key; who came first is first.
        self._waiting: dict[Hashable, deque[_Piece[_I, _R]]] = {}
        self._is_due = False

    def begin(
        self, key: Hashable, item: _I, *, share: float, work: _Work[_I, _R]
    ) -> asyncio.Future[_R]:
        """Return what will be known of an item once `work` is done with it, and with others.

        `work` is told of several items of one key, and returns as much of each. An item is so large
        a `share` of what is done in one turn of the loop; one that is larger is done alone.
        """
        done: asyncio.Future[_R] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(_Piece(item, share, work, done))
        self._go_on()
        return done

    def _go_on(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            self._after(_TURNS)

    def _after(self, turns: int) -> None:
        """Do a step so many turns after the next one."""
        if turns:
            asyncio.get_running_loop().call_soon(self._after, turns - 1)
        else:
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        self._is_due = False
        pieces = self._next_pieces()
        self.was_shared = len(pieces) > 1
        self._go_on()
        try:
            found = pieces[0].work([piece.item for piece in pieces])
            for piece, one in zip(pieces, found, strict=True):
                if not piece.done.done():
                    piece.done.set_result(one)
        except Exception as error:  # noqa: BLE001 - a bug is told to all that wait for it
            for piece in pieces:
                if not piece.done.done():
                    piece.done.set_exception(error)

    def _next_pieces(self) -> list[_Piece[_I, _R]]:
        key = next(iter(self._waiting))
        waiting = self._waiting.pop(key)
        pieces = [waiting.popleft()]
        share = pieces[0].share
        while waiting and share + waiting[0].share <= 1:
            pieces.append(waiting.popleft())
            share += pieces[-1].share
        if waiting:
            # Behind those of other keys.
            self._waiting[key] = waiting
        return pieces
