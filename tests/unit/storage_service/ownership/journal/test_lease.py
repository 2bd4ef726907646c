"""When an owner may answer reads, and when another may take over: never both."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.storage_service.log.filesystem import Buffer
from streamhouse.storage_service.ownership.journal._writer import JournalWriter
from streamhouse.storage_service.ownership.journal.lease import (
    LeaseKeeper,
    LeaseWatch,
    SeenLease,
    read_lease,
)
from streamhouse.storage_service.ownership.journal.names import Place
from streamhouse.storage_service.ownership.journal.store.object_store import StoreUnavailableError
from tests.support.examples import examples
from tests.support.journal_world import NAMES, taken
from tests.support.memory_store import MemoryStore


@dataclass
class _Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


class _SlowStore(MemoryStore):
    """A renewal takes a time, before or after it takes effect, and may fail."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self.clock = clock
        self.before_s = self.after_s = 0.0
        self.is_away = False

    def replace(self, key: str, data: Buffer) -> None:
        self.clock.now_s += self.before_s
        if self.is_away:
            raise StoreUnavailableError(key)
        super().replace(key, data)
        self.clock.now_s += self.after_s


class _Owner:
    def __init__(self, store: _SlowStore) -> None:
        self.epoch = self.stored_epoch = 1
        self.rolls = 0
        self.keeper = LeaseKeeper(
            store,
            NAMES,
            epoch=lambda: self.epoch,
            is_opening=lambda: self.stored_epoch > self.epoch,
            opened_s=store.clock(),
            on_lapse=self.roll,
            endpoint="http://a",
            lease_ms=10_000,
            clock=store.clock,
        )

    def roll(self) -> None:
        self.rolls += 1


def test_a_lease_holds_from_before_it_was_sent() -> None:
    clock = _Clock()
    store = _SlowStore(clock)
    owner = _Owner(store)
    store.before_s = store.after_s = 2.0

    owner.keeper.renew()

    assert owner.keeper.is_valid
    assert owner.keeper.valid_ms == pytest.approx(9_900 - 4_000)
    assert read_lease(store, NAMES, 1) == SeenLease("http://a", 1, 10_000)


def test_a_lease_that_ran_out_never_holds_again_but_that_of_the_next_epoch_does() -> None:
    clock = _Clock()
    store = _SlowStore(clock)
    owner = _Owner(store)
    clock.now_s += 11

    owner.keeper.renew()
    owner.keeper.renew()
    assert (owner.keeper.is_valid, owner.rolls) == (False, 2)
    owner.epoch = owner.stored_epoch = 2
    owner.keeper.renew()

    assert owner.keeper.is_valid


def test_a_lease_is_not_renewed_in_the_epoch_before_one_that_may_be_open() -> None:
    """The next epoch is stored, and its answer is late: watchers look at that one alone."""
    clock = _Clock()
    store = _LateAnswers(clock)
    writer = JournalWriter(store, taken(store), on_fenced=lambda _: None)
    keeper = LeaseKeeper(
        store,
        NAMES,
        epoch=lambda: writer.epoch,
        is_opening=lambda: writer.is_opening,
        opened_s=clock(),
        on_lapse=lambda: None,
        endpoint="http://a",
        lease_ms=10_000,
        clock=clock,
    )
    writer.roll(is_empty_left=True)
    store.is_opened.wait()
    watch = LeaseWatch(lease_ms=10_000, clock=clock)

    for _ in range(10):
        watch.look(store, NAMES)
        assert (watch.epoch, watch.has_run_out) == (2, False)
        clock.now_s += 1
        keeper.renew()
    watch.look(store, NAMES)

    assert watch.has_run_out
    assert not keeper.is_valid
    store.may_answer.set()
    writer.abandon()


class _LateAnswers(_SlowStore):
    """Opens the second epoch, and says so late."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__(clock)
        self.is_opened, self.may_answer = threading.Event(), threading.Event()

    def create(self, key: str, buffers: Sequence[Buffer]) -> None:
        super().create(key, buffers)
        if key == NAMES.object(Place(2, 0)):
            self.is_opened.set()
            self.may_answer.wait()


def test_a_lease_runs_out_while_a_watcher_is_answered_the_same() -> None:
    clock = _Clock()
    watch = LeaseWatch(lease_ms=10_000, clock=clock)
    assert not watch.has_run_out
    lease = SeenLease("http://a", 1, 10_000)
    for _ in range(11):
        assert not watch.has_run_out
        watch.seen(1, lease, asked_s=clock(), owner_ms=10_000)
        clock.now_s += 1

    assert watch.has_run_out
    watch.seen(2, None, asked_s=clock(), owner_ms=10_000)
    assert (watch.has_run_out, watch.epoch) == (False, 2)


def test_time_in_which_nobody_is_answered_does_not_count() -> None:
    """The store was away: the owner, who could not renew, has time to do it."""
    clock = _Clock()
    watch = LeaseWatch(lease_ms=9_000, clock=clock)
    lease = SeenLease("http://a", 1, 9_000)
    watch.seen(1, lease, asked_s=clock(), owner_ms=9_000)
    clock.now_s += 60

    watch.seen(1, lease, asked_s=clock(), owner_ms=9_000)

    assert not watch.has_run_out
    assert watch.remaining_ms == pytest.approx(6_000)


def test_a_longer_lease_of_the_owner_counts() -> None:
    clock = _Clock()
    watch = LeaseWatch(lease_ms=1_000, clock=clock)
    for _ in range(2):
        watch.seen(1, None, asked_s=clock(), owner_ms=20_000)
        clock.now_s += 15

    assert not watch.has_run_out


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b'{"counter": 1, "endpoint": 2, "lease_ms": 1}', b"\xff"]
)
def test_a_lease_that_makes_no_sense_is_none(text: bytes) -> None:
    store = MemoryStore()
    store.replace(NAMES.lease(1), text)

    assert read_lease(store, NAMES, 1) is None


@settings(max_examples=examples(500))
@given(seed=st.integers(0, 1 << 32))
def test_no_owner_holds_its_lease_once_a_watcher_may_seal(seed: int) -> None:
    """Renewals and questions of any length at any time; the watcher seals the epoch it judged."""
    by_chance = random.Random(seed)
    clock = _Clock()
    store = _SlowStore(clock)
    owner = _Owner(store)
    watch = LeaseWatch(lease_ms=by_chance.choice([2_000, 10_000]), clock=clock)
    for _ in range(200):
        clock.now_s += by_chance.choice([0.0, 0.3, 3.0, 3.0, by_chance.uniform(0, 12)])
        if by_chance.random() < 0.5:
            store.before_s = by_chance.choice([0.0, by_chance.uniform(0, 12)])
            store.after_s = by_chance.choice([0.0, by_chance.uniform(0, 12)])
            store.is_away = by_chance.random() < 0.2
            try:
                owner.keeper.renew()
            except StoreUnavailableError:
                continue
            if owner.stored_epoch > owner.epoch:
                # It is told so at last.
                owner.epoch = owner.stored_epoch
            elif by_chance.random() < (0.5 if owner.rolls else 0.1):
                owner.stored_epoch, owner.rolls = owner.epoch + 1, 0
        else:
            asked_s, epoch = clock(), owner.stored_epoch
            clock.now_s += by_chance.uniform(0, 3)
            watch.seen(epoch, read_lease(store, NAMES, epoch), asked_s=asked_s, owner_ms=10_000)
        if watch.has_run_out and watch.epoch == owner.stored_epoch:
            assert not owner.keeper.is_valid


def test_a_watcher_asks_the_store() -> None:
    store, clock = MemoryStore(), _Clock()
    watch = LeaseWatch(lease_ms=1_000, clock=clock)
    watch.look(store, NAMES)
    assert watch.epoch == 0
    taken(store, lease_ms=5_000)
    watch.look(store, NAMES)
    assert (watch.epoch, watch.remaining_ms) == (1, 5_000)

    for _ in range(5):
        clock.now_s += 1
        watch.look(store, NAMES)

    assert watch.has_run_out


@pytest.mark.parametrize(
    ("endpoint", "owner"),
    [
        ("http://10.0.0.1:8765", "http://10.0.0.1:8765"),
        ("https://[::1]:8765", "https://[::1]:8765"),
        ("http://a\x1b[2J:1", None),
        ("http://a:1\n", None),
        ("http://user:secret@a:1", None),
        ("file:///etc/passwd", None),
        ("", None),
    ],
)
def test_a_lease_names_its_owner_by_a_plain_url_or_not_at_all(
    endpoint: str, owner: str | None
) -> None:
    assert SeenLease(endpoint, 1, 1_000).owner == owner


def test_a_store_that_is_away_for_hours_is_no_line_every_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_asked_enough = threading.Event()
    asked = 0

    class Away(MemoryStore):
        def replace(self, key: str, data: Buffer) -> None:
            nonlocal asked
            asked += 1
            if asked == 20:
                is_asked_enough.set()
            raise StoreUnavailableError(key)

    keeper = LeaseKeeper(
        Away(),
        NAMES,
        epoch=lambda: 1,
        is_opening=lambda: False,
        opened_s=0.0,
        on_lapse=lambda: None,
        endpoint="http://here",
        lease_ms=60,
    )
    keeper.start()
    assert is_asked_enough.wait(60)
    keeper.close()

    assert caplog.text.count("lease_not_renewed") == 1
