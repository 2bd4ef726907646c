"""The cache knows the newest row, that there is none, or nothing; and keeps to its budget."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from random import Random

import numpy as np
import pyarrow as pa
import pytest

from streamhouse.core.model.hashing.key_hash import PROCESS_HASHER, KeyHasher
from streamhouse.storage_service.kv.cache._row_arena import RowArena
from streamhouse.storage_service.kv.cache._row_cache import RowCache

UNKNOWN = "unknown"


def key(number: int) -> bytes:
    return b"\x01" + number.to_bytes(8, "big")


def row(text: str, *, size: int = 40) -> bytes:
    return text.encode().ljust(size, b".")


def put(cache: RowCache, rows: dict[int, bytes | None]) -> None:
    keys = pa.array([key(n) for n in rows], pa.binary())
    cache.put(keys, pa.array(list(rows.values()), pa.binary()))


def _hand_over(cache: RowCache) -> None:
    cache.run_begun()
    cache.run_ended(is_written=True)


def get(cache: RowCache, numbers: list[int]) -> list[bytes | str | None]:
    keys = pa.array([key(n) for n in numbers], pa.binary())
    values, unknown = cache.get(keys)
    known = [
        UNKNOWN if unknown is not None and unknown[i] else value
        for i, value in enumerate(values.to_pylist())
    ]
    few = cache.get_few(cache._hasher.few(keys.to_pylist()), bytes_max=1 << 30)
    assert few is not None
    alone = [UNKNOWN if i in few.unknown else value for i, value in enumerate(few.values)]
    assert alone == known
    return known


def test_a_new_cache_knows_that_nothing_is_there() -> None:
    cache = RowCache(budget_bytes=1 << 20)

    assert cache.complete
    assert get(cache, [1, 2]) == [None, None]


def test_what_is_deleted_during_a_run_is_known_to_be_gone_until_the_next() -> None:
    cache = RowCache(budget_bytes=1 << 20)
    cache.start_loading(0)
    cache.stop_loading()
    put(cache, {1: None, 2: None})
    put(cache, {1: row("a")})
    cache.run_begun()
    put(cache, {1: None})

    cache.run_ended(is_written=True)

    # RocksDB has the row, and was told of the other.
    assert get(cache, [1, 2]) == [None, UNKNOWN]
    _hand_over(cache)
    assert get(cache, [1]) == [UNKNOWN]


@pytest.mark.slow
@pytest.mark.parametrize("few_keys", [0, 64])
def test_deletes_that_wait_for_rocksdb_are_counted(few_keys: int) -> None:
    """Rows that come and go leave nothing but them."""
    cache = RowCache(budget_bytes=1 << 20, few_keys=few_keys)
    ids = list(range(50))
    put(cache, dict.fromkeys(ids))
    rounds = 400
    before = cache.memory_bytes
    tracemalloc.start()
    for _ in range(rounds):
        put(cache, dict.fromkeys(ids))
    counted, (held, _) = cache.memory_bytes - before, tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert counted == rounds * len(ids) * 16
    assert held < 1.2 * counted + 10_000
    cache.run_begun()
    assert cache.memory_bytes - before == counted
    cache.run_ended(is_written=False)
    assert cache.memory_bytes - before == counted
    _hand_over(cache)
    assert cache.memory_bytes < before


def test_put_replace_delete() -> None:
    cache = RowCache(budget_bytes=1 << 20)
    put(cache, {1: row("a"), 2: row("b"), 3: row("c")})

    put(cache, {2: row("longer", size=90), 3: None, 4: row("d")})

    assert get(cache, [4, 3, 2, 1, 5]) == [row("d"), None, row("longer", size=90), row("a"), None]
    _hand_over(cache)
    assert get(cache, [3, 1]) == [None, row("a")]


def test_a_deleted_row_is_remembered_until_rocksdb_knows() -> None:
    """Otherwise it would be asked, and still have the row."""
    cache = RowCache(budget_bytes=1 << 20)
    cache.start_loading(10)
    assert get(cache, [1]) == [UNKNOWN]

    put(cache, {1: None})
    assert get(cache, [1, 2]) == [None, UNKNOWN]

    # RocksDB knows now, but the snapshot that is being loaded still has the row.
    _hand_over(cache)
    assert cache.load(pa.array([key(1), key(2)]), pa.array([row("old"), row("b")]))
    assert get(cache, [1, 2]) == [None, row("b")]
    cache.finish_loading()
    assert cache.complete
    assert get(cache, [1, 2, 3]) == [None, row("b"), None]


def test_loading_never_replaces_what_is_newer() -> None:
    cache = RowCache(budget_bytes=1 << 20)
    cache.start_loading(10)
    put(cache, {1: row("new")})

    cache.load(pa.array([key(1), key(2)]), pa.array([row("old"), row("b")]))

    assert get(cache, [1, 2, 3]) == [row("new"), row("b"), UNKNOWN]


def test_loading_ends_where_the_budget_does() -> None:
    cache = RowCache(budget_bytes=40_000, segment_bytes=1_000)
    cache.start_loading(1_000)
    loaded = 0
    while cache.load(
        pa.array([key(loaded + i) for i in range(50)]), pa.array([row(str(loaded))] * 50)
    ):
        loaded += 50

    assert 50 <= loaded < 1_000
    cache.finish_loading()
    assert not cache.complete
    assert get(cache, [0, 999]) == [row("0"), UNKNOWN]


def test_what_rocksdb_does_not_have_is_never_evicted() -> None:
    cache = RowCache(budget_bytes=1, segment_bytes=100)
    put(cache, {n: row(str(n)) for n in range(100)})

    cache.tidy()
    assert cache.complete
    assert get(cache, list(range(100))) == [row(str(n)) for n in range(100)]

    _hand_over(cache)
    cache.tidy()
    assert not cache.complete
    known = [n for n, value in enumerate(get(cache, list(range(100)))) if value != UNKNOWN]
    assert len(known) < 5, "only the segment being filled stays"


def test_a_budget_bounds_the_memory() -> None:
    cache = RowCache(budget_bytes=400_000, segment_bytes=4_000)
    for start in range(0, 20_000, 500):
        put(cache, {n: row(str(n)) for n in range(start, start + 500)})
        _hand_over(cache)
        cache.tidy()

    assert cache.memory_bytes <= 400_000
    # The latest are the ones that stay.
    assert get(cache, [19_999]) == [row("19999")]


def test_superseded_rows_give_their_memory_back() -> None:
    cache = RowCache(budget_bytes=1 << 30, segment_bytes=10_000)
    for round_ in range(300):
        put(cache, {n: row(f"{n} {round_}") for n in range(100)})
        _hand_over(cache)
        cache.tidy()

    assert cache.complete
    assert cache.memory_bytes < 60_000
    assert get(cache, [0, 99]) == [row("0 299"), row("99 299")]


@pytest.mark.parametrize("few_keys", [0, 10, 64])
@pytest.mark.parametrize("bits", [64, 3, 0])
def test_it_is_a_dict_even_if_hashes_collide(bits: int, few_keys: int) -> None:
    """With few bits nearly all keys have the first hash in common."""
    random = Random(bits)
    mask = np.uint64((1 << bits) - 1)

    class Weak(KeyHasher):
        def many(self, keys: pa.Array):  # type: ignore[no-untyped-def]
            first, second = KeyHasher.many(self, keys)
            return first & mask, second

        def one(self, key: bytes) -> tuple[int, int]:
            first, second = KeyHasher.one(self, key)
            return first & int(mask), second

    cache = RowCache(budget_bytes=1 << 30, segment_bytes=1_000, hasher=Weak(), few_keys=few_keys)
    model: dict[int, bytes | None] = {}
    for step in range(60):
        some = random.sample(range(60), random.randrange(20))
        changes = {n: None if random.random() < 0.3 else row(f"{n} {step}") for n in some}
        keys = [key(n) for n in changes]
        if random.random() < 0.5:
            cache.get_to_write(cache._hasher.hashed(pa.array(keys, pa.binary())), 1 << 30)
        elif random.random() < 0.5:
            assert cache.get_few_to_write(keys) == [model.get(n) for n in changes]
        put(cache, changes)
        model |= changes
        if random.random() < 0.3:
            _hand_over(cache)
        cache.tidy()

        assert get(cache, list(range(60))) == [model.get(n) for n in range(60)]


@pytest.mark.parametrize("few_keys", [0, 64])
def test_writing_what_was_just_read_finds_the_same_places(few_keys: int) -> None:
    cache = RowCache(budget_bytes=1 << 20, few_keys=few_keys)
    put(cache, {n: row("a") for n in range(50)})
    keys = pa.array([key(n) for n in range(40, 60)], pa.binary())
    cache.get_to_write(PROCESS_HASHER.hashed(keys), 1 << 30)
    cache.get_few_to_write(keys.to_pylist())
    # What is read and written in between moves slots.
    put(cache, {n: row("between") for n in range(45, 2_000)})

    cache.put(keys, pa.array([row("b")] * 20, pa.binary()))

    assert get(cache, [39, 40, 59, 60]) == [row("a"), row("b"), row("b"), row("between")]
    assert get(cache, [1_999]) == [row("between")]


def test_few_keys_of_which_nothing_is_known_are_not_answered() -> None:
    cache = RowCache(budget_bytes=1 << 20)
    cache.start_loading(1)
    put(cache, {1: row("a"), 2: None})

    assert cache.get_few_to_write([key(1), key(2)]) == [row("a"), None]
    assert cache.get_few_to_write([key(1), key(3)]) is None


class _Interrupted:
    """A lock that lets `act` happen whenever it is given back, but not within itself."""

    def __init__(self) -> None:
        self.act: Callable[[], None] | None = None
        self.times = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        act, self.act = self.act, None
        if act is not None:
            self.times += 1
            act()
            self.act = act


@pytest.mark.parametrize("is_small", [False, True], ids=["all fits", "evicting"])
def test_who_writes_is_let_in_while_many_rows_are_read(
    is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row is as it was at some moment of the call, whatever happens in between."""
    random = Random(5)
    count, budget = 20_000, 1_000_000 if is_small else 1 << 30
    lock = _Interrupted()
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Lock", lambda: lock)
        cache = RowCache(budget_bytes=budget, segment_bytes=50_000)
    history: dict[int, list[bytes | None]] = {}
    versions = iter(range(1_000))

    def write() -> None:
        version = next(versions)
        some = random.sample(range(count), 3_000)
        changes = {n: None if n % 7 == version % 7 else row(f"{n} {version}") for n in some}
        put(cache, changes)
        for n, value in changes.items():
            history.setdefault(n, [None]).append(value)
        _hand_over(cache)
        for _ in range(5):
            cache.tidy()

    for _ in range(30):
        write()
    numbers = random.sample(range(count), count)
    keys = pa.array([key(n) for n in numbers], pa.binary())
    for _ in range(5):
        before = {n: len(seen) for n, seen in history.items()}
        lock.act, lock.times = write, 0
        found = cache.get_within(keys, 1 << 30)
        lock.act = None

        assert lock.times >= 4
        assert found is not None
        flags = np.zeros(count, np.bool_) if found.unknown is None else found.unknown
        assert flags.any() == is_small
        for n, value, is_unknown in zip(numbers, found.values.to_pylist(), flags, strict=True):
            possible = history.get(n, [None])[before.get(n, 1) - 1 :]
            assert value is None if is_unknown else value in possible


def test_who_reads_is_let_in_while_many_rows_are_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are new some are seen sooner; all that were there are seen all the time."""
    lock = _Interrupted()
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Lock", lambda: lock)
        cache = RowCache(budget_bytes=1 << 30)
    old, new = {n: row(f"old {n}") for n in range(100)}, {n: row(f"{n}") for n in range(50, 20_000)}
    put(cache, old)
    numbers = list(range(20_000))
    counts = []

    def read() -> None:
        seen = dict(zip(numbers, get(cache, numbers), strict=True))
        counts.append(len(seen) - list(seen.values()).count(None))
        assert all(seen[n] == old[n] for n in range(50))
        assert all(seen[n] in (old.get(n), new[n]) for n in range(50, 20_000))

    lock.act = read
    put(cache, new)

    assert lock.times >= 5
    assert counts == sorted(counts)
    assert counts[-1] == 20_000


def test_rows_of_more_bytes_than_are_asked_for_are_not_read() -> None:
    cache = RowCache(budget_bytes=1 << 20)
    put(cache, {n: row("a", size=100) for n in range(50)})
    keys = pa.array([key(n) for n in range(60)], pa.binary())

    assert cache.get_within(keys, 4_999) is None
    found = cache.get_within(keys, 5_000)
    assert found is not None
    assert found.values.null_count == 10
    assert len(cache.get(keys.slice(0, 0)).values) == 0


def test_rows_longer_than_a_segment_get_their_own() -> None:
    arena = RowArena(segment_bytes=64)
    values = [row("a"), row("b" * 500, size=500), row("c"), row("d")]

    locations = arena.append(pa.array(values, pa.binary()))

    assert arena.rows_at(locations).to_pylist() == values
    assert [arena.row_at(location) for location in locations.tolist()] == values
    assert arena.memory_bytes == sum(map(len, values))
