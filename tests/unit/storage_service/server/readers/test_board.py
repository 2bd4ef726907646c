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
    assert view.published() is None
    chance = random.Random(1)
    starts, ends = (tuple(chance.randrange(1 << 63) for _ in range(BUCKETS_MAX)) for _ in range(2))

    board.write(SLOTS - 1, 5, starts, ends, 77)

    assert view.published() == (starts, ends, 77)
    assert view.published() is view.published()
    assert SlotView(seen, SLOTS - 2, 5, BUCKETS_MAX).published() is None
    seen.close()


def test_another_generation_is_not_read(board: Board) -> None:
    view = SlotView(board, 3, 7, 2)
    board.write(3, 7, (0, 1), (1, 2))
    assert view.published() == ((0, 1), (1, 2), 0)

    board.write(3, 8, (0, 1), (1, 2))
    assert view.published() is None
    board.write(3, 0, (), ())
    assert view.published() is None
    board.write(3, 7, (0, 1), (3, 4))
    assert view.published() == ((0, 1), (3, 4), 0)


@pytest.mark.parametrize("written", [0, 1])
def test_a_copy_that_is_being_written_is_not_read(board: Board, written: int) -> None:
    """The other copy is read, however long the writer is without a processor."""
    view = SlotView(board, 0, 1, 3)
    board.write(0, 1, (0, 0, 5), (10, 20, 30))
    assert view.published() == ((0, 0, 5), (10, 20, 30), 0)
    size = len(board.memory) // (SLOTS + 1) // 2
    start = written * size + 24
    board.memory[start : start + 8] = (11).to_bytes(8, "little")

    assert view.published() == ((0, 0, 5), (10, 20, 30), 0)
    assert SlotView(board, 0, 1, 3).published() == ((0, 0, 5), (10, 20, 30), 0)
    other = (1 - written) * size + 24
    board.memory[other : other + 8] = (11).to_bytes(8, "little")
    assert SlotView(board, 0, 1, 3).published() is None

    board.write(0, 1, (1, 1, 6), (11, 21, 31))
    assert view.published() == ((1, 1, 6), (11, 21, 31), 0)


def _publish(descriptor: int, count: int) -> None:
    board = Board(descriptor)
    for number in range(1, count + 1):
        board.write(1, 1, [number - 1] * 8, [number] * 8)


def test_offsets_are_never_mixed_nor_go_back(board: Board) -> None:
    board.write(1, 1, [0] * 8, [1] * 8)
    view, count, last = SlotView(board, 1, 1, 8), 20_000, 0
    context = multiprocessing.get_context("fork")
    writer = context.Process(target=_publish, args=(board.descriptor, count))
    writer.start()
    while last < count:
        published = view.published()
        assert published is not None
        assert len(set(published.ends)) == len(set(published.starts)) == 1
        assert published.ends[0] == published.starts[0] + 1
        assert published.ends[0] >= last
        last = published.ends[0]
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
