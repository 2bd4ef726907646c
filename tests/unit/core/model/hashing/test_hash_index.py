"""The hash table equals a dict, with few and with very unlucky hashes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.model.hashing.hash_index import HashIndex

Pair = tuple[int, int]


def u64(numbers: list[int]) -> npt.NDArray[np.uint64]:
    return np.array(numbers, dtype=np.uint64)


def insert(index: HashIndex, pairs: list[Pair], numbers: list[int]) -> None:
    index.insert(u64([a for a, _ in pairs]), u64([b for _, b in pairs]), u64(numbers))


def found(index: HashIndex, pairs: list[Pair]) -> list[int | None]:
    slots = index.find(u64([a for a, _ in pairs]), u64([b for _, b in pairs]))
    assert [index.find_one(a, b) for a, b in pairs] == slots.tolist()
    return [int(index.numbers[s]) if s >= 0 else None for s in slots.tolist()]


# All in one group of eight, all with one tag, alike in one hash, or spread.
_TOP = st.sampled_from([0, 1 << 63, (1 << 64) - 1])
HASHES = {
    "spread": st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
    "one group": st.tuples(st.integers(0, 255), st.integers(0, 9)),
    "one tag": st.tuples(st.integers(0, 2**50).map(lambda n: n << 7), st.integers(0, 9)),
    "twins": st.tuples(_TOP, st.integers(0, 2**64 - 1)),
}


@pytest.mark.parametrize("kind", list(HASHES))
@given(data=st.data())
def test_it_is_a_dict(kind: str, data: st.DataObject) -> None:
    pairs = data.draw(st.lists(HASHES[kind], unique=True, max_size=60))
    cut = data.draw(st.integers(0, len(pairs)))
    there, others = pairs[:cut], pairs[cut:]
    index = HashIndex(groups=data.draw(st.integers(11, 70)))

    insert(index, there, list(range(100, 100 + cut)))

    assert found(index, pairs) == [*range(100, 100 + cut), *[None] * len(others)]
    assert len(index) == cut

    # Some go, the others come in two portions; then again in a copy.
    gone = data.draw(st.sets(st.sampled_from(there))) if there else set()
    slots = index.find(u64([a for a, _ in gone]), u64([b for _, b in gone]))
    index.remove(slots)
    half = len(others) // 2
    insert(index, others[:half], [7] * half)
    for pair in others[half:]:
        index.insert_one(*pair, 8)
    expected = [None if pair in gone else 100 + i for i, pair in enumerate(there)]
    expected += [7] * half + [8] * (len(others) - half)
    assert found(index, pairs) == expected
    copy = index.resized(data.draw(st.integers(0, 1000)))
    assert found(copy, pairs) == expected
    assert len(copy) == len(index) == len(pairs) - len(gone)


def test_it_grows_with_its_keys_and_shrinks_without() -> None:
    random = np.random.default_rng(1)
    index = HashIndex()
    first, second = random.integers(0, 2**63, (2, 20_000), dtype=np.uint64)
    for start in range(0, 20_000, 1_000):
        part = slice(start, start + 1_000)
        if not index.room_for(1_000):
            index = index.resized(1_000)
        index.insert(first[part], second[part], np.arange(start, start + 1_000, dtype=np.uint64))

    assert index.numbers[index.find(first, second)].tolist() == list(range(20_000))
    assert index.memory_bytes < 20_000 * 60
    assert not index.is_sparse

    index.remove(index.find(first[:19_000], second[:19_000]))
    assert index.is_sparse
    small = index.resized(0)
    assert small.memory_bytes < index.memory_bytes / 4
    assert not small.is_sparse
    assert (small.find(first, second) >= 0).tolist() == [False] * 19_000 + [True] * 1_000


def test_a_number_can_be_changed_in_place() -> None:
    index = HashIndex()
    insert(index, [(1, 2), (3, 4)], [10, 20])

    index.numbers[index.find(u64([3]), u64([4]))] = 30

    assert found(index, [(1, 2), (3, 4)]) == [10, 30]
