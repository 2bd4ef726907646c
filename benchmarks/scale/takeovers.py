"""Leases and takeovers of many shards: what the store is asked, and how long nobody owns a shard.

Owners renew leases and look for their seal; standbys of another zone watch, follow the journal, and
take over. Then a zone fails, or the store is away. What decides is the product's own: its watcher
(`journal/lease.py`) on the clock of this world, and its protocol (`journal/epochs.py`), each step
of which is a request to a store of one shard in memory.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from benchmarks.scale.costs import ASKED_TO_FOLLOW
from benchmarks.scale.world import LOST, Program, Request, Sleep, StoreModel, World
from streamhouse.storage_service.log.filesystem import Buffer
from streamhouse.storage_service.ownership.journal._pipeline import Pipeline
from streamhouse.storage_service.ownership.journal.epochs import TakenByOtherError, take
from streamhouse.storage_service.ownership.journal.lease import LeaseWatch, SeenLease
from streamhouse.storage_service.ownership.journal.names import Place, ShardNames
from streamhouse.storage_service.ownership.journal.operations import Append
from streamhouse.storage_service.ownership.journal.steps import Create, Get, Steps, do, run
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectEntry,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectStoreError,
)

__all__ = ["PRODUCT", "LeaseSettings", "Outcome", "Scenario", "Watch", "simulate"]

_ZONES: Final = 3
_NAMES: Final = ShardNames()
_LOG: Final = "tables/1/bucket-0/00000000000000000000.log"


class Watch(Protocol):
    """What a standby knows of a lease: `LeaseWatch`, or another to compare with."""

    def seen(self, epoch: int, lease: SeenLease | None, *, asked_s: float, owner_ms: int) -> None:
        """Take note of the newest epoch and its lease."""

    @property
    def has_run_out(self) -> bool:
        """Whether the lease has not changed for a whole lease time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """The product's intervals, and its watcher."""

    lease_ms: int
    renew_s: float
    watch_s: float
    look_s: float  # an idle owner, at the next place of its journal
    follow_s: float  # a standby, at the next object of the journal
    load_s: float  # a shard's record in the directory
    new_watch: Callable[[int, Callable[[], float]], Watch]


# The defaults of `serve`, and the intervals of `journal/lease.py`, `journal/writer.py`,
# `server/ownership/taking.py` and of a shard's record in the directory.
PRODUCT: Final = LeaseSettings(
    lease_ms=10_000,
    renew_s=10 / 3,
    watch_s=1.0,
    look_s=1.0,
    follow_s=0.25,
    load_s=10.0,
    new_watch=lambda lease_ms, clock: LeaseWatch(lease_ms=lease_ms, clock=clock),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What happens to how many shards."""

    shards: int
    seed: int = 20261123
    seconds: float = 40.0
    quiet_s: float = 15.0  # then it happens
    zone_fails: bool = False
    store_away_s: float = 0.0
    standbys: int = 1  # of every shard
    directory_requests: int = 25  # of a new owner: the names it holds, its record
    journal_objects: int = 300
    tail_objects: int = 5  # that a warm standby has not applied yet


@dataclass(slots=True)
class Outcome:
    """What was seen."""

    at_rest_per_s: float = 0.0
    peak_per_s: int = 0
    takeovers: int = 0
    needless_takeovers: int = 0
    lost_races: int = 0
    ownerless: int = 0
    waits_s: list[float] = field(default_factory=list)
    by_kind: dict[str, int] = field(default_factory=dict)

    @property
    def longest_wait_s(self) -> float:
        """From the failure until the last shard that failed had an owner that serves."""
        return max(self.waits_s, default=0.0)

    @property
    def median_wait_s(self) -> float:
        """The same of the shard in the middle."""
        return sorted(self.waits_s)[len(self.waits_s) // 2] if self.waits_s else 0.0


class _Objects:
    """`ObjectStore` of one shard, as far as the protocol asks."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self._objects = objects
        self._keys = sorted(objects)

    def copy(self) -> _Objects:
        return _Objects(dict(self._objects))

    def has(self, key: str) -> bool:
        return key in self._objects

    def create(self, key: str, buffers: Sequence[Buffer]) -> None:
        if key in self._objects:
            raise ObjectExistsError(key)
        self._objects[key] = b"".join(buffers)
        bisect.insort(self._keys, key)

    def get(self, key: str, *, bytes_max: int) -> memoryview:
        del bytes_max
        if key not in self._objects:
            raise ObjectNotFoundError(key)
        return memoryview(self._objects[key])

    def list_objects(
        self, folder: str, *, start_after: str = "", count_max: int = 1_000
    ) -> list[ObjectEntry]:
        first = bisect.bisect_right(self._keys, max(folder, start_after))
        found = self._keys[first : first + count_max]
        return [
            ObjectEntry(key, len(self._objects[key])) for key in found if key.startswith(folder)
        ]


def _journal(object_count: int, lease_ms: int) -> _Objects:
    """Return a journal whose first epoch has so many objects; one for all shards to begin with."""
    store = _Objects({})
    tenure = run(
        take(_NAMES, after=0, endpoint="http://owner", lease_ms=lease_ms),
        lambda step: do(store, step),  # type: ignore[arg-type]
    )
    pipeline = Pipeline(tenure)
    for _ in range(object_count):
        sent = pipeline.send([Append(_LOG, 0, bytes(500))])
        store.create(sent.key, sent.buffers)
        pipeline.stored(sent)
    return store


@dataclass(slots=True)
class _Shard:
    """What the store has of a shard, and which process last became its owner."""

    store: _Objects
    next_seq: int
    epoch: int = 1
    counter: int = 0
    owner_zone: int | None = None
    ownerless_since: float | None = None


def simulate(scenario: Scenario, settings: LeaseSettings) -> Outcome:
    """Return what is seen in one world."""
    return _Run(scenario, settings).outcome


class _Run:
    """One world with its shards."""

    def __init__(self, scenario: Scenario, settings: LeaseSettings) -> None:
        away = (scenario.quiet_s, scenario.quiet_s + scenario.store_away_s)
        self._scenario = scenario
        self._settings = settings
        self._world = World(seed=scenario.seed, store=StoreModel(away=away))
        self._dead_zone: int | None = None
        self.outcome = Outcome()
        journal = _journal(scenario.journal_objects, settings.lease_ms)
        self._shards = [self._start(n % _ZONES, journal.copy()) for n in range(scenario.shards)]
        if scenario.zone_fails:
            self._world.at(scenario.quiet_s, self._fail_zone)
        self._world.run(scenario.seconds)
        self._sum_up()

    def _start(self, zone: int, store: _Objects) -> _Shard:
        # All processes start within a second, as by one deployment: the worst for a herd.
        shard = _Shard(store, self._scenario.journal_objects + 1, owner_zone=zone)
        self._start_owner(shard, zone, 1)
        for other in range(1, self._scenario.standbys + 1):
            self._start_standby(shard, (zone + other) % _ZONES)
        return shard

    def _fail_zone(self) -> None:
        self._dead_zone = 0
        for shard in self._shards:
            if shard.owner_zone == 0:
                shard.owner_zone, shard.ownerless_since = None, self._world.now

    def _run(self, zone: int, *programs: Program) -> None:
        for program in programs:
            self._world.start(program, lambda: zone != self._dead_zone)

    def _start_owner(self, shard: _Shard, zone: int, epoch: int) -> None:
        self._run(
            zone,
            self._renew(shard, epoch),
            self._look(shard, epoch, zone),
            self._report_load(shard, epoch),
        )

    def _start_standby(self, shard: _Shard, zone: int) -> None:
        self._run(zone, self._watch(shard, zone))

    def _soon(self) -> Sleep:
        return Sleep(self._world.chance.random())

    # -- what an owner does ----------------------------------------------------------------------

    def _renew(self, shard: _Shard, epoch: int) -> Program:
        """Replace the lease, as long as this is the owner."""

        def renewed() -> None:
            if shard.epoch == epoch:
                shard.counter += 1

        yield self._soon()
        renewed_s = self._world.now
        while shard.epoch == epoch:
            sent_s = self._world.now
            if (yield Request("lease PUT", renewed)) is not LOST:
                if sent_s - renewed_s > self._settings.lease_ms / 1e3:
                    # A lease that ran out never holds again: the owner rolls its epoch.
                    yield Request("journal PUT", _nothing, count=2)
                renewed_s = sent_s
            yield Sleep(self._settings.renew_s)

    def _look(self, shard: _Shard, epoch: int, zone: int) -> Program:
        """Look at the next place, as an owner does that has nothing to store."""
        key = _NAMES.object(Place(epoch, shard.next_seq))
        yield self._soon()
        while (yield Request("journal GET", lambda: shard.store.has(key))) is not True:
            yield Sleep(self._settings.look_s)
        # It was fenced: its process ended, and is started again as a standby.
        yield Sleep(5.0)
        self._start_standby(shard, zone)

    def _report_load(self, shard: _Shard, epoch: int) -> Program:
        """Replace the shard's record in the directory."""
        yield Sleep(self._world.chance.uniform(0, self._settings.load_s))
        while shard.epoch == epoch:
            yield Request("directory PUT", _nothing)
            yield Sleep(self._settings.load_s)

    # -- what a standby does ---------------------------------------------------------------------

    def _watch(self, shard: _Shard, zone: int) -> Program:
        """Read the lease until it has run out; then take over, or be late and watch on."""
        watch, epoch = self._new_watch(), shard.epoch
        yield self._soon()
        while True:
            asked_s = self._world.now
            found = yield Request("journal LIST", _nothing)
            if found is not LOST:
                found = yield Request("lease GET", lambda: (shard.epoch, shard.counter))
            if found is not LOST:
                epoch, counter = found
                lease = SeenLease("http://owner", counter, self._settings.lease_ms)
                lease_ms = self._settings.lease_ms
                watch.seen(epoch, lease, asked_s=asked_s, owner_ms=lease_ms)
            if watch.has_run_out:
                if (yield from self._take_over(shard, zone, epoch)):
                    return
                watch = self._new_watch()
            yield Sleep(self._settings.watch_s)

    def _new_watch(self) -> Watch:
        return self._settings.new_watch(self._settings.lease_ms, lambda: self._world.now)

    def _take_over(
        self, shard: _Shard, zone: int, epoch: int
    ) -> Generator[Sleep | Request, Any, bool]:
        """Take the next epoch, read what is missing, serve."""
        lease_ms = self._settings.lease_ms
        steps = take(_NAMES, after=epoch, endpoint="http://other", lease_ms=lease_ms)
        try:
            tenure = yield from _asked(steps, shard.store)
        except TakenByOtherError:
            self.outcome.lost_races += 1
            return False
        self.outcome.takeovers += 1
        if shard.owner_zone is not None:
            self.outcome.needless_takeovers += 1
        shard.owner_zone, shard.epoch, shard.next_seq = zone, tenure.epoch, 1
        yield Request("lease PUT", _nothing)
        yield Request("journal GET", _nothing, count=self._scenario.tail_objects)
        if self._scenario.directory_requests:
            yield Request("directory GET", _nothing, count=self._scenario.directory_requests)
        if shard.ownerless_since is not None:
            self.outcome.waits_s.append(self._world.now - shard.ownerless_since)
            shard.ownerless_since = None
        self._start_owner(shard, zone, tenure.epoch)
        return True

    def _sum_up(self) -> None:
        asked, scenario = self._world.store.asked, self._scenario
        # Every standby looks for the next object, whatever else happens: counted, not played.
        looks = scenario.shards * scenario.standbys / self._settings.follow_s
        follows = ASKED_TO_FOLLOW * looks
        rest = range(5, int(scenario.quiet_s))
        at_rest = sum(asked[second] for second in rest) / len(rest)
        later = range(int(scenario.quiet_s) + 1, int(scenario.seconds))
        left = (_ZONES - 1) / _ZONES if scenario.zone_fails else 1
        self.outcome.at_rest_per_s = at_rest + follows
        self.outcome.peak_per_s = max(asked[second] for second in later) + round(follows * left)
        self.outcome.ownerless = sum(shard.ownerless_since is not None for shard in self._shards)
        self.outcome.by_kind = dict(self._world.store.by_kind)


def _asked(steps: Steps[Any], store: _Objects) -> Generator[Sleep | Request, Any, Any]:
    """Take the steps of a protocol, each as a request; one that gets no answer is repeated."""
    throw: ObjectStoreError | None = None
    answer: Any = None
    while True:
        try:
            step = steps.send(answer) if throw is None else steps.throw(throw)
        except StopIteration as stop:
            return stop.value
        kind = "PUT" if isinstance(step, Create) else "GET" if isinstance(step, Get) else "LIST"
        found: Any = LOST
        while found is LOST:
            found = yield Request(f"journal {kind}", lambda step=step: _done(store, step))
        answer, throw = found


def _done(store: _Objects, step: Any) -> tuple[Any, ObjectStoreError | None]:
    try:
        return do(store, step), None  # type: ignore[arg-type]
    except ObjectStoreError as error:
        return None, error


def _nothing() -> None:
    """What a request does that changes nothing here."""
