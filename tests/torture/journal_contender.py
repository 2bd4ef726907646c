"""One process that wants a journal: takes it when the lease runs out, records, reads, may roll.

Each line of its ledger is one acknowledged record or one answered read, written with one `write`
after the fact, so what a killed process had acknowledged is known:
`record ASKED_NS TOLD_NS TEXT` or `read ASKED_NS TOLD_NS NEWEST_TEXT`.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from typing import Final

from streamhouse.core.errors import NotOwnerError
from streamhouse.storage_service.ownership.journal._writer import JournalWriter, WriterOptions
from streamhouse.storage_service.ownership.journal.epochs import (
    SealReason,
    TakenByOtherError,
    Tenure,
    find_seal,
    take,
)
from streamhouse.storage_service.ownership.journal.lease import LeaseKeeper, LeaseWatch
from streamhouse.storage_service.ownership.journal.names import Place, ShardNames
from streamhouse.storage_service.ownership.journal.operations import Replace
from streamhouse.storage_service.ownership.journal.reader import JournalReader
from streamhouse.storage_service.ownership.journal.steps import Step, do, run
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectStore,
    ObjectStoreError,
)
from streamhouse.storage_service.ownership.journal.store.store_opening import open_store

__all__ = ["FENCED", "NAMES", "PATH", "texts_of"]

FENCED: Final = 3
"""The exit code of a process that was fenced."""
NAMES: Final = ShardNames("0")
PATH: Final = "tables/1/bucket-0/any.json"


def texts_of(store: ObjectStore, *, before: Place | None = None) -> list[str]:
    """Return every record of the journal, in order."""
    reader = JournalReader(store, NAMES, start=Place(1, 0), ahead=4)
    found: list[str] = []
    while before is None or reader.place < before:
        if (one := reader.next()) is None:
            break
        found.extend(bytes(op.data).decode() for op in one.operations if isinstance(op, Replace))
    reader.close()
    return found


class _Contender:
    def __init__(self, url: str, ledger: str, name: str, lease_ms: int) -> None:
        self.store = open_store(url)
        self.ledger = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.name = name
        self.lease_ms = lease_ms
        self.chance = random.Random(name)
        self.newest = ""
        """The last record that is stored, of whichever owner."""
        self.is_over = False

    def do(self, step: Step) -> object:
        return do(self.store, step)

    def run(self) -> None:
        watch = LeaseWatch(lease_ms=self.lease_ms)
        while True:
            pause_s = self.lease_ms / 1e3 / 10 * self.chance.uniform(0.5, 1.0)
            time.sleep(pause_s)  # sleep: the poll of a watcher
            try:
                watch.look(self.store, NAMES)
                if watch.epoch and not watch.has_run_out and not self.has_stopped(watch.epoch):
                    continue
                opened_s = time.monotonic()
                tenure = run(
                    take(NAMES, after=watch.epoch, endpoint=self.name, lease_ms=self.lease_ms),
                    self.do,
                )
            except (TakenByOtherError, ObjectStoreError):
                continue
            self.own(tenure, opened_s)

    def has_stopped(self, epoch: int) -> bool:
        seal = run(find_seal(NAMES, epoch), self.do)
        return seal is not None and seal.reason == SealReason.STOPPED

    def own(self, tenure: Tenure, opened_s: float) -> None:
        texts = texts_of(self.store, before=Place(tenure.epoch, 0))
        self.newest = texts[-1] if texts else ""
        options = WriterOptions(linger_ms=1, in_flight_max=self.chance.choice((1, 4, 16)))
        writer = JournalWriter(
            self.store, tenure, on_fenced=lambda _: os._exit(FENCED), options=options
        )
        keeper = LeaseKeeper(
            self.store,
            NAMES,
            epoch=lambda: writer.epoch,
            is_opening=lambda: writer.is_opening,
            opened_s=opened_s,
            on_lapse=lambda: writer.roll(is_empty_left=True),
            endpoint=self.name,
            lease_ms=self.lease_ms,
        )
        keeper.start()
        self.is_over = False
        producers = [
            threading.Thread(target=self.produce, args=(writer, f"{self.name}/{tenure.epoch}/{n}"))
            for n in range(4)
        ]
        for producer in producers:
            producer.start()
        self.serve(writer, keeper)
        for producer in producers:
            producer.join()
        writer.stop(timeout_s=10)
        keeper.close()

    def serve(self, writer: JournalWriter, keeper: LeaseKeeper) -> None:
        """Answer reads, for a time that is drawn."""
        end_s = time.monotonic() + self.chance.choice((0.5, 2.0, 60.0))
        while time.monotonic() < end_s:
            asked_ns = time.monotonic_ns()
            newest = self.newest
            if keeper.is_valid:
                self.tell("read", asked_ns, newest)
            if self.chance.random() < 0.02:
                writer.roll()
            time.sleep(0.005)  # sleep: so many reads are enough
        self.is_over = True

    def produce(self, writer: JournalWriter, name: str) -> None:
        number = 0
        while not self.is_over:
            text, asked_ns = f"{name}/{number}", time.monotonic_ns()
            number += 1
            stored = threading.Event()
            try:
                position = writer.record(Replace(PATH, text.encode()))
            except NotOwnerError:
                return
            # Callbacks come in the order of the journal.
            writer.when_stored(position, lambda text=text, stored=stored: self.seen(text, stored))
            stored.wait()
            self.tell("record", asked_ns, text)

    def seen(self, text: str, stored: threading.Event) -> None:
        self.newest = text
        stored.set()

    def tell(self, what: str, asked_ns: int, text: str) -> None:
        line = f"{what} {asked_ns} {time.monotonic_ns()} {text}\n"
        os.write(self.ledger, line.encode())


if __name__ == "__main__":
    _Contender(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])).run()
