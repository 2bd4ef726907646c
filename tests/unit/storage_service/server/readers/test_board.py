"""The board of published ends: what is published is read whole, and of one generation only."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Iterator

import pytest

from streamhouse.core.errors import NotOwnerError
from streamhouse.storage_service.ownership.roles.boot_clock import boot_clock_s
from streamhouse.storage_service.server.readers._board import (
    BUCKETS_MAX,
    SLOTS,
    Board,
    BoardTenure,
    SlotView,
)


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.create()
    yield made
    made.close()


def test_another_process_sees_what_is_published(board: Board) -> None:
    seen = Board(os.dup(board.descriptor))
    view = SlotView(seen, SLOTS - 1, 5, BUCKETS_MAX)
    assert view.ends() is None
    ends = tuple(random.Random(1).randrange(1 << 63) for _ in range(BUCKETS_MAX))

    board.write(SLOTS - 1, 5, ends)

    assert view.ends() == ends
    assert SlotView(seen, SLOTS - 2, 5, BUCKETS_MAX).ends() is None
    seen.close()


def test_another_generation_is_not_read(board: Board) -> None:
    view = SlotView(board, 3, 7, 2)
    board.write(3, 7, (1, 2))
    assert view.ends() == (1, 2)

    board.write(3, 8, (1, 2))
    assert view.ends() is None
    board.write(3, 0, ())
    assert view.ends() is None
    board.write(3, 7, (3, 4))
    assert view.ends() == (3, 4)


def test_a_record_that_is_being_written_is_not_read(board: Board) -> None:
    view = SlotView(board, 0, 1, 3)
    board.write(0, 1, (10, 20, 30))
    assert view.ends() == (10, 20, 30)
    start = 16
    board.memory[start : start + 8] = (11).to_bytes(8, "little")

    assert view.ends() is None

    board.write(0, 1, (11, 21, 31))
    assert view.ends() == (11, 21, 31)


def _publish(descriptor: int, count: int) -> None:
    board = Board(descriptor)
    for number in range(1, count + 1):
        board.write(1, 1, [number] * 8)


def test_ends_are_never_mixed_nor_go_back(board: Board) -> None:
    board.write(1, 1, [0] * 8)
    view, count, last = SlotView(board, 1, 1, 8), 20_000, 0
    context = multiprocessing.get_context("fork")
    writer = context.Process(target=_publish, args=(board.descriptor, count))
    writer.start()
    while last < count:
        ends = view.ends()
        assert ends is not None
        assert len(set(ends)) == 1
        assert ends[0] >= last
        last = ends[0]
    writer.join()
    assert writer.exitcode == 0


def test_a_lease_holds_until_its_time(board: Board) -> None:
    tenure = BoardTenure(board)
    with pytest.raises(NotOwnerError):
        tenure.check()

    board.write_lease(boot_clock_s() + 1_000)
    tenure.check()
    tenure.check_write()

    board.write_lease(boot_clock_s())
    with pytest.raises(NotOwnerError):
        tenure.check()
