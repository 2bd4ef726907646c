"""A key that was added is found by its number, every other one is not there."""

from __future__ import annotations

import numpy as np
import pytest

from streamhouse.connector.lookup._key_index import KeyIndex, Words

COUNT = 100_000
KEYS: dict[str, Words] = {
    "small": np.arange(COUNT, dtype=np.uint64),
    "far apart": np.arange(COUNT, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15),
    "alike in their low bits": np.arange(COUNT, dtype=np.uint64) << np.uint64(44),
    "at the ends": np.arange(COUNT, dtype=np.int64).view(np.uint64) - np.uint64(COUNT // 2),
}


def numbered(count: int) -> list[int]:
    return list(range(1, count + 1))


@pytest.mark.parametrize("kind", KEYS)
def test_keys_are_found_by_their_numbers_however_they_come(kind: str) -> None:
    keys = KEYS[kind]
    at_once, in_parts = KeyIndex(1), KeyIndex(1)
    at_once.add(keys)
    for start in range(0, COUNT, 7_777):
        in_parts.add(keys[start : start + 7_777])

    for index in (at_once, in_parts):
        assert index.find(keys).tolist() == numbered(COUNT)
        assert index.find(keys[::-1][:5]).tolist() == numbered(COUNT)[::-1][:5]
        assert not index.find(keys + np.uint64(1 << 63)).any() or kind.startswith("alike")
    assert in_parts.memory_bytes < 3 * at_once.memory_bytes


def test_two_words_are_one_key() -> None:
    first = np.repeat(np.arange(300, dtype=np.uint64), 300)
    second = np.tile(np.arange(300, dtype=np.uint64), 300)
    index = KeyIndex(2)
    index.add(first, second)

    assert index.find(first, second).tolist() == numbered(90_000)
    assert not index.find(first, second + np.uint64(300)).any()
    assert not index.find(first + np.uint64(300), second).any()


def test_a_key_gets_another_number_is_forgotten_and_comes_back() -> None:
    keys = np.arange(COUNT, dtype=np.uint64)
    index = KeyIndex(1)
    index.add(keys)
    asked = np.array([7, COUNT + 1, 8], dtype=np.uint64)
    numbers = np.array([COUNT + 7, COUNT + 8, COUNT + 9], dtype=np.uint64)

    assert index.renumber(asked, numbers=numbers).tolist() == [False, True, False]
    index.add(asked[1:2], numbers=numbers[1:2])
    index.forget(np.array([9, 9, 10, COUNT + 5], dtype=np.uint64))

    wanted = [i + 1 for i in range(COUNT)]
    wanted[7:11] = [COUNT + 7, COUNT + 9, 0, 0]
    for _ in range(2):
        assert index.find(keys).tolist() == wanted
        assert index.find(asked).tolist() == numbers.tolist()
        # The same in another process.
        index = KeyIndex(
            1,
            seed=index.seed,
            levels=index.levels,
            count=index.count,
            has_forgotten=index.has_forgotten,
        )
    assert not index.renumber(keys[10:11], numbers=numbers[:1] + np.uint64(10)).any()
    wanted[10] = COUNT + 17
    assert index.find(keys).tolist() == wanted
    # A larger table has the others alone.
    index.add(np.arange(COUNT + 10, 3 * COUNT, dtype=np.uint64))
    assert index.find(keys).tolist() == wanted
    assert not index.has_forgotten


def test_few_more_keys_than_it_was_made_for_move_none() -> None:
    index = KeyIndex(1)
    index.add(np.arange(COUNT, dtype=np.uint64))
    (largest, *_) = index.levels

    index.add(np.arange(COUNT, COUNT + COUNT // 10, dtype=np.uint64))

    assert index.levels[0] is largest
    assert index.find(np.arange(COUNT + COUNT // 10, dtype=np.uint64)).all()


def test_without_keys_nothing_is_there() -> None:
    index = KeyIndex(1)
    nothing = np.zeros(0, dtype=np.uint64)
    assert index.find(np.zeros(3, dtype=np.uint64)).tolist() == [0, 0, 0]
    index.add(nothing)
    assert index.find(nothing).tolist() == []
    index.add(np.zeros(1, dtype=np.uint64))
    assert index.find(np.arange(2, dtype=np.uint64)).tolist() == [1, 0]
