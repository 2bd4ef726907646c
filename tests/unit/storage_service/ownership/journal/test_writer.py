"""What is recorded is stored in order, whatever the store does; a process that is fenced ends."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from streamhouse.core.errors import CorruptDataError, NotOwnerError
from streamhouse.storage_service.log.filesystem import Buffer
from streamhouse.storage_service.ownership.journal._writer import JournalWriter, WriterOptions
from streamhouse.storage_service.ownership.journal.names import Place
from streamhouse.storage_service.ownership.journal.object_format import BODY_BYTES_MAX
from streamhouse.storage_service.ownership.journal.operations import Replace
from tests.support.journal_world import NAMES, numbered, numbers_in, taken
from tests.support.memory_store import FaultyMemoryStore, MemoryStore


class _HeldStore(MemoryStore):
    """Stores nothing while it is held."""

    def __init__(self) -> None:
        super().__init__()
        self.may_store = threading.Event()
        self.may_store.set()
        self.asked = threading.Semaphore(0)

    def create(self, key: str, buffers: Sequence[Buffer]) -> None:
        self.asked.release()
        assert self.may_store.wait(60)
        super().create(key, buffers)


class _ToldStore(MemoryStore):
    """Says when it has stored something."""

    def __init__(self) -> None:
        super().__init__()
        self.stored = threading.Semaphore(0)

    def create(self, key: str, buffers: Sequence[Buffer]) -> None:
        super().create(key, buffers)
        self.stored.release()


class _World:
    def __init__(self) -> None:
        self.fenced: list[str] = []
        self.is_fenced = threading.Event()
        self.writers: list[JournalWriter] = []

    def on_fenced(self, reason: str) -> None:
        self.fenced.append(reason)
        self.is_fenced.set()

    def writer(self, store: MemoryStore, options: WriterOptions | None = None) -> JournalWriter:
        writer = JournalWriter(store, taken(store), on_fenced=self.on_fenced, options=options)
        self.writers.append(writer)
        return writer


@pytest.fixture
def world() -> Iterator[_World]:
    made = _World()
    yield made
    for writer in made.writers:
        writer.abandon()


def test_what_is_recorded_is_stored_in_order_and_a_stop_seals(world: _World) -> None:
    store = MemoryStore()
    writer = world.writer(store)
    called: list[int] = []

    for number in range(200):
        assert writer.record(numbered(number)) == number + 1
        writer.when_stored(number + 1, partial(called.append, number))
    writer.wait_stored(writer.recorded_position)
    assert writer.stop(timeout_s=60)

    assert numbers_in(store) == list(range(200)) == numbers_in(store, ahead=4)
    assert called == list(range(200))
    assert (writer.lag_bytes, writer.lag_ms) == (0, 0)
    with pytest.raises(NotOwnerError):
        writer.record(numbered(200))
    assert not world.fenced


@pytest.mark.parametrize("seed", range(20))
def test_a_store_that_misbehaves_changes_nothing(world: _World, seed: int) -> None:
    store = FaultyMemoryStore(seed)
    options = WriterOptions(linger_ms=0, in_flight_max=8)
    writer = world.writer(store, options)
    called: list[int] = []

    for number in range(60):
        position = writer.record(numbered(number))
        writer.when_stored(position, partial(called.append, number))
        if number % 20 == 10:
            writer.roll()
        if number % 3 == 0:
            writer.wait_stored(position)
    assert writer.stop(timeout_s=60)

    store.calm_down()
    assert numbers_in(store) == list(range(60)) == called
    assert writer.epoch > 1
    assert not world.fenced


def test_operations_that_wait_go_together(world: _World) -> None:
    store = _HeldStore()
    writer = world.writer(store, WriterOptions(linger_ms=60_000, in_flight_max=2))
    store.may_store.clear()
    assert store.asked.acquire(timeout=60)  # of the taking
    for number in range(3):
        writer.record(numbered(number))
    # What is recorded together is sent once somebody waits for it, not in the middle of it.
    assert writer.in_flight == 0
    writer.when_stored(3, lambda: None)
    assert store.asked.acquire(timeout=60)

    for number in range(3, 50):
        writer.record(numbered(number))
    writer.when_stored(50, lambda: None)
    assert writer.lag_bytes > 0
    store.may_store.set()
    writer.wait_stored(50)

    assert writer.objects_stored == 2
    assert writer.place_of(0) == (Place(1, 1), 0)
    assert writer.place_of(2) == (Place(1, 1), 2)
    assert writer.place_of(49) == (Place(1, 2), 46)
    assert writer.place_of(50) == (Place(1, 3), 0)


def test_what_nobody_waits_for_is_stored_all_the_same(world: _World) -> None:
    store = MemoryStore()
    writer = world.writer(store, WriterOptions(linger_ms=1))

    for number in range(5):
        writer.record(numbered(number))
        while writer.lag_bytes:
            assert not world.is_fenced.wait(0.001)

    assert numbers_in(store) == list(range(5))
    assert writer.objects_stored == 5


def test_what_nobody_waits_for_lingers_less_than_the_journal_may_be_behind(world: _World) -> None:
    store = _HeldStore()
    writer = world.writer(store, WriterOptions(linger_ms=3_600_000, lag_ms_max=10))
    assert store.asked.acquire(timeout=60)  # of the taking

    writer.record(numbered(0))

    assert store.asked.acquire(timeout=60)


@pytest.mark.parametrize("seed", range(5))
def test_what_nobody_waits_for_is_stored_whatever_was_waited_for_before(
    world: _World, seed: int
) -> None:
    """Whoever is woken for what is wanted, somebody looks for the rest when it is due."""
    chance = random.Random(seed)
    store = _ToldStore()
    writer = world.writer(store, WriterOptions(linger_ms=1, lag_ms_max=8))

    for number in range(60):
        position = writer.record(numbered(number))
        what = chance.random()
        if what < 0.4:
            writer.wait_stored(position)
        elif what < 0.7:
            while number not in numbers_in(store):
                assert store.stored.acquire(timeout=60)
    while 59 not in numbers_in(store):
        assert store.stored.acquire(timeout=60)


def test_what_is_large_goes_at_once_though_nobody_waits_for_it(world: _World) -> None:
    store = _HeldStore()
    writer = world.writer(store, WriterOptions(linger_ms=60_000))

    assert store.asked.acquire(timeout=60)  # of the taking
    for number in range(8):
        writer.record(numbered(number, size_bytes=1 << 19))
    assert store.asked.acquire(timeout=60)
    writer.record(numbered(8))
    assert not store.asked.acquire(blocking=False)
    writer.wait_stored(9)

    assert writer.place_of(7) == (Place(1, 1), 7)
    assert writer.place_of(8) == (Place(1, 2), 0)


def test_who_gathers_waits_for_what_is_on_its_way(world: _World) -> None:
    store = _HeldStore()
    writer = world.writer(store, WriterOptions(linger_ms=60_000))
    assert store.asked.acquire(timeout=60)  # of the taking
    writer.gather()
    writer.record(numbered(0))
    # It is not on its way: nobody waits for it, and what comes next may go with it.
    writer.gather()
    store.may_store.clear()
    writer.when_stored(1, lambda: None)
    assert store.asked.acquire(timeout=60)

    with ThreadPoolExecutor(1) as other:
        gathering = other.submit(writer.gather)
        assert not gathering.done()
        store.may_store.set()
        gathering.result(30)

    assert (writer.stored_position, writer.in_flight) == (1, 0)


def test_who_gathers_waits_no_longer_than_the_linger(world: _World) -> None:
    store = _HeldStore()
    writer = world.writer(store, WriterOptions(linger_ms=1))
    store.may_store.clear()
    writer.record(numbered(0))
    writer.when_stored(1, lambda: None)
    assert store.asked.acquire(timeout=60)  # of the taking
    assert store.asked.acquire(timeout=60)

    writer.gather()

    assert writer.in_flight == 1
    store.may_store.set()


def test_a_callback_may_wait_for_what_was_wanted_before(world: _World) -> None:
    """It has the thread that would have sent it next."""
    store = _HeldStore()
    writer = world.writer(store, WriterOptions(linger_ms=60_000))
    store.may_store.clear()
    assert store.asked.acquire(timeout=60)  # of the taking
    writer.record(numbered(0))
    waited = threading.Event()

    def wait() -> None:
        writer.wait_stored(2)
        waited.set()

    writer.when_stored(1, wait)
    assert store.asked.acquire(timeout=60)
    writer.record(numbered(1))
    writer.when_stored(2, lambda: None)
    store.may_store.set()

    assert waited.wait(60)


def test_a_large_operation_has_an_object_of_its_own_and_record_waits_for_room(
    world: _World,
) -> None:
    store = _HeldStore()
    writer = world.writer(store, WriterOptions(in_flight_max=1, waiting_bytes_max=1_000))
    store.may_store.clear()
    writer.record(numbered(0, size_bytes=BODY_BYTES_MAX + 1))
    assert store.asked.acquire(timeout=60)
    assert store.asked.acquire(timeout=60)
    writer.record(numbered(1, size_bytes=900))

    with ThreadPoolExecutor(1) as other:
        late = other.submit(writer.record, numbered(2, size_bytes=900))
        assert not late.done()
        assert writer.recorded_position == 2
        store.may_store.set()
        assert late.result(30) == 3
    writer.wait_stored(3)
    assert numbers_in(store) == [0, 1, 2]


def test_a_store_that_was_away_gets_everything(world: _World) -> None:
    store = FaultyMemoryStore(0, share=0)
    writer = world.writer(store)
    store.is_away = True
    for number in range(10):
        writer.record(numbered(number))
    while writer.failures < 2:
        assert not world.is_fenced.wait(0.01)

    store.is_away = False
    writer.wait_stored(10)

    assert numbers_in(store) == list(range(10))


def test_an_owner_that_is_taken_over_is_told_once_and_acknowledges_nothing(world: _World) -> None:
    store = MemoryStore()
    zombie = world.writer(store)
    zombie.record(numbered(0))
    zombie.wait_stored(1)
    other = world.writer(store)
    called: list[int] = []

    zombie.when_stored(2, lambda: called.append(1))
    zombie.record(numbered(1))
    assert world.is_fenced.wait(60)
    with pytest.raises(NotOwnerError, match="took over"):
        zombie.wait_stored(2)
    with pytest.raises(NotOwnerError, match="took over"):
        zombie.record(numbered(2))
    other.record(numbered(10))
    other.wait_stored(1)

    assert not called
    assert len(world.fenced) == 1
    assert numbers_in(store) == [0, 10]


@pytest.mark.slow
def test_an_idle_owner_notices_that_it_was_taken_over(world: _World) -> None:
    store = MemoryStore()
    world.writer(store)
    world.writer(store)

    assert world.is_fenced.wait(60)

    assert len(world.fenced) == 1


def test_an_epoch_without_anything_is_left_when_its_lease_ran_out(world: _World) -> None:
    store = _HeldStore()
    writer = world.writer(store)

    writer.roll()
    writer.roll(is_empty_left=True)
    # The epoch opened, its seal, and the next one opened.
    assert all(store.asked.acquire(timeout=60) for _ in range(3))
    writer.wait_stored(writer.record(numbered(0)))

    assert writer.epoch == 2
    assert numbers_in(store) == [0]


def test_a_roll_goes_on_in_the_next_epoch(world: _World) -> None:
    store = MemoryStore()
    writer = world.writer(store)
    writer.roll()
    for number in range(5):
        writer.record(numbered(number))
        writer.wait_stored(number + 1)
        writer.roll()
        epoch = writer.epoch
    writer.stop(timeout_s=60)

    assert epoch > 2
    assert numbers_in(store) == list(range(5))
    opened = [key for key in store.objects if key.endswith("/" + "0" * 12)]
    assert opened == [NAMES.object(Place(one, 0)) for one in range(1, writer.epoch + 1)]


class _SlowStore(MemoryStore):
    """Stores an object of operations late, so that what is sent after it may be there before."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on_its_way = threading.Event()
        self.is_late = threading.Event()
        self.before_a_seal: list[int] = []

    def create(self, key: str, buffers: Sequence[Buffer]) -> None:
        place = NAMES.place_of_object(key)
        if place == Place(1, 1):
            self.is_on_its_way.set()
            # Set by a seal that did not wait for this; else the time runs out.
            self.is_late.wait(0.5)
        elif place == Place(1, 2):
            self.before_a_seal.append(sum(one.startswith(NAMES.epoch(1)) for one in self.objects))
            self.is_late.set()
        super().create(key, buffers)


@pytest.mark.parametrize("is_stop", [False, True])
def test_an_owner_seals_its_epoch_once_all_else_is_stored(world: _World, is_stop: bool) -> None:
    """Who starts after its death takes a gap before its seal for a loss, and refuses to start."""
    store = _SlowStore()
    writer = world.writer(store)
    writer.record(numbered(0))
    assert store.is_on_its_way.wait(60)

    if is_stop:
        assert writer.stop(timeout_s=60)
    else:
        writer.roll()
        writer.record(numbered(1))
        writer.wait_stored(2)

    assert store.before_a_seal == [2], "the object that opens the epoch, and that of the row"


def test_an_operation_that_cannot_be_is_refused_where_it_is_recorded(world: _World) -> None:
    writer = world.writer(MemoryStore())

    with pytest.raises(CorruptDataError):
        writer.record(Replace("../x", b""))

    assert writer.recorded_position == 0


def test_callbacks_may_record_and_wait_for_nothing(world: _World) -> None:
    store = MemoryStore()
    writer = world.writer(store, WriterOptions(in_flight_max=1, waiting_bytes_max=1))
    done = threading.Event()

    def again() -> None:
        if writer.recorded_position == 20:
            done.set()
        else:
            writer.when_stored(writer.record(numbered(writer.recorded_position)), again)
            writer.when_stored(writer.recorded_position, lambda: None)

    writer.when_stored(writer.record(numbered(0)), again)

    assert done.wait(60)
