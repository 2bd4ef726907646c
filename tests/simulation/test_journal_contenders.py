"""Several who want to own one journal at once, on a directory and on S3 that misbehaves.

Each takes the epoch whenever it can, records, and leaves by a clean stop, as if killed, or not
until it is fenced. What was acknowledged to any of them is in the journal once, in the order of
real time.
"""

from __future__ import annotations

import functools
import itertools
import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

import pytest

from streamhouse.core.errors import NotOwnerError
from streamhouse.storage_service.ownership.journal._asked_store import PatientStore
from streamhouse.storage_service.ownership.journal._writer import JournalWriter, WriterOptions
from streamhouse.storage_service.ownership.journal.epochs import (
    TakenByOtherError,
    newest_epoch,
    take,
)
from streamhouse.storage_service.ownership.journal.names import Place, ShardNames
from streamhouse.storage_service.ownership.journal.operations import Replace
from streamhouse.storage_service.ownership.journal.reader import JournalReader
from streamhouse.storage_service.ownership.journal.steps import do, run
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectStore,
    ObjectStoreError,
)
from streamhouse.storage_service.ownership.journal.store.store_opening import open_store
from tests.support.faulty_store import CALM, FaultPlan
from tests.support.journal_machines import JournalHome, StoreKind

pytestmark = pytest.mark.slow

_NAMES: Final = ShardNames("0")
_PATH: Final = "tables/1/bucket-0/any.json"
_CONTENDERS: Final = 4
_SECONDS: Final = 5.0
_PLAN: Final = FaultPlan(share=0.2, delay_ms_max=100)


class Acknowledged(NamedTuple):
    """A record that was acknowledged between two moments."""

    asked_ns: int
    told_ns: int
    text: str


class Contender(threading.Thread):
    """Takes the journal again and again until it is over; `error` is what ended it."""

    def __init__(self, store: ObjectStore, number: int, is_over: threading.Event) -> None:
        super().__init__(name=f"contender-{number}", daemon=True)
        self._store = store
        self._random = random.Random(number)
        self._texts = (f"{number}/{n}" for n in itertools.count())
        self._is_over = is_over
        self.acknowledged: list[Acknowledged] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._is_over.is_set():
                with suppress(TakenByOtherError):
                    self._own()
                self._is_over.wait(self._random.random() * 0.2)
        except ObjectStoreError as error:
            # The store was away when it was over.
            self.error = None if self._is_over.is_set() else error
        except BaseException as error:  # noqa: BLE001 - told to the test, which raises it
            self.error = error

    def _own(self) -> None:
        store = PatientStore(
            self._store,
            pause=lambda seconds: not self._is_over.wait(seconds),
            failed=lambda _: None,
        )
        step = functools.partial(do, store)
        after = run(newest_epoch(_NAMES), step)
        url = f"http://{self.name}"
        tenure = run(take(_NAMES, after=after, endpoint=url, lease_ms=1_000), step)
        is_fenced = threading.Event()
        writer = JournalWriter(
            self._store,
            tenure,
            on_fenced=lambda _: is_fenced.set(),
            options=WriterOptions(linger_ms=1, in_flight_max=self._random.choice((1, 4, 16))),
        )
        way = self._random.choice(("stop", "as if killed", "zombie"))
        end_s = time.monotonic() + (3.0 if way == "zombie" else self._random.uniform(0.1, 1.0))
        with suppress(NotOwnerError):
            while time.monotonic() < end_s and not (is_fenced.is_set() or self._is_over.is_set()):
                self._record(writer)
        if way == "stop":
            writer.stop(timeout_s=5)
        else:
            writer.abandon()

    def _record(self, writer: JournalWriter) -> None:
        text, asked_ns = next(self._texts), time.monotonic_ns()
        position = writer.record(Replace(_PATH, text.encode()))
        writer.when_stored(
            position,
            lambda: self.acknowledged.append(Acknowledged(asked_ns, time.monotonic_ns(), text)),
        )
        if self._random.random() < 0.3:
            writer.wait_stored(position)
        if self._random.random() < 0.02:
            writer.roll()


@pytest.mark.parametrize("kind", ["file", "faulty s3"])
def test_what_any_of_them_was_told_is_in_the_journal_once_and_in_order(kind: StoreKind) -> None:
    is_over = threading.Event()
    with JournalHome(kind, seed=15) as home:
        store = open_store(home.url, properties=home.properties)
        contenders = [Contender(store, number, is_over) for number in range(_CONTENDERS)]
        if home.faulty is not None:
            home.faulty.plan = _PLAN
        for contender in contenders:
            contender.start()
        is_over.wait(_SECONDS)
        is_over.set()
        for contender in contenders:
            contender.join()
        if home.faulty is not None:
            home.faulty.plan = CALM
        texts = list(_texts(store))

    for contender in contenders:
        assert contender.error is None, contender.name
    acknowledged = [one for contender in contenders for one in contender.acknowledged]
    assert acknowledged
    places = {text: place for place, text in enumerate(texts)}
    assert len(places) == len(texts), "a record is there twice"
    assert not {one.text for one in acknowledged} - places.keys(), "acknowledged records are lost"
    _check_real_time_order(acknowledged, places)


def _texts(store: ObjectStore) -> Iterator[str]:
    reader = JournalReader(store, _NAMES, start=Place(1, 0))
    while (found := reader.next()) is not None:
        for operation in found.operations:
            assert isinstance(operation, Replace)
            yield bytes(operation.data).decode()


def _check_real_time_order(acknowledged: list[Acknowledged], places: dict[str, int]) -> None:
    """What was asked for after another was told of lies behind it."""
    told = iter(sorted(acknowledged, key=lambda one: one.told_ns))
    following = next(told, None)
    last = -1
    for one in sorted(acknowledged, key=lambda one: one.asked_ns):
        while following is not None and following.told_ns < one.asked_ns:
            last = max(last, places[following.text])
            following = next(told, None)
        assert places[one.text] > last, f"{one.text} lies before what was told before it"
