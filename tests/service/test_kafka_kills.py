"""Kafka clients while the service is killed: each acknowledged record once, in order.

A group of librdkafka's reads and commits all the while: it is given every record, in order.

Without a journal, and with one: on the same disk in both ways of acknowledging; and with
`--journal-ack journal` also when each death takes the disk.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from streamhouse.client import StorageClient
from tests.support.free_ports import free_port
from tests.support.kafka_group import LibrdkafkaMember, PollingGroup
from tests.support.kafka_producers import (
    BrokerPlace,
    IdempotentProducer,
    StandingGroup,
    create_topics,
    judge_topics,
    topic_producers,
)
from tests.support.service_process import DiedAtStart, ServiceProcess

pytestmark = pytest.mark.slow

_LEASE_MS: Final = 500
_STEPS: Final = (
    *("append-queued", "append-written", "append-synced"),
    *("append-unpublished", "append-published"),
    *("upsert-planned", "upsert-applying", "upsert-applied", "upsert-published"),
    *("part-staged", "commit-deciding", "commit-decided", "commit-publishing"),
    *("commit-published", "file-renamed"),
)


class Death(NamedTuple):
    """How a life ends: once so many batches were acknowledged in it, or by itself at a step."""

    acknowledged: int
    step: str | None = None
    count: int = 1


def drawn_deaths(seed: int, *, batch_count: int, deaths: int, at_steps: bool = True) -> list[Death]:
    """Draw how lives end while so many batches are acknowledged.

    Every other death comes while clients repeat what the one before it interrupted.
    """
    chance = random.Random(f"deaths {seed}")
    share = batch_count // deaths
    found = []
    for number in range(deaths):
        if number % 2:
            found.append(Death(chance.choice((0, 1, 3))))
        elif not at_steps or chance.random() < 0.5:
            found.append(Death(chance.randrange(1, share)))
        else:
            found.append(Death(share, chance.choice(_STEPS), chance.choice((1, 2, 10, 30))))
    return found


class Home:
    """One directory on one disk, which every death leaves as it is."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self._arguments = arguments
        self._ports: dict[str, int] = {}
        self._process: ServiceProcess | None = None

    def start(self, command: Sequence[str] | None = None) -> ServiceProcess:
        """Return a process that serves; raises `DiedAtStart`."""
        self._process = self.begun("one", command=command)
        return self._process

    def begun(
        self, name: str, *arguments: str, command: Sequence[str] | None = None
    ) -> ServiceProcess:
        """Start a process on the directory of this name."""
        port = ("--kafka-port", str(self._port(name)))
        given = (self.folder / name, *port, *self._arguments, *arguments)
        process = (
            ServiceProcess(*given) if command is None else ServiceProcess(*given, command=command)
        )
        return process.__enter__()

    def brokers(self) -> str:
        """Every address at which Kafka clients may find it, in any life."""
        return f"127.0.0.1:{self._port('one')}"

    def _port(self, name: str) -> int:
        return self._ports.setdefault(name, free_port())

    def end(self) -> None:
        """Kill the process that served, and let befall its disk what does."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.__exit__(None, None, None)

    def stand_alone(self) -> None:
        """Let nobody take over any more."""

    def close(self) -> None:
        """End what runs."""
        self.end()


class EmptyDiskHome(Home):
    """The disk is lost with every death: a journal has all."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        super().__init__(folder, *arguments, "--lease-ms", str(_LEASE_MS))

    def end(self) -> None:
        super().end()
        shutil.rmtree(self.folder / "one", ignore_errors=True)


class StandbyHome(Home):
    """The disk is lost with every death, and a standby takes over. Nobody dies at a step."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        super().__init__(folder, *arguments, "--lease-ms", str(_LEASE_MS))
        self._names = ("one", "two")
        self._standby: ServiceProcess | None = None

    def brokers(self) -> str:
        return f"{super().brokers()},127.0.0.1:{self._port('two')}"

    def start(self, command: Sequence[str] | None = None) -> ServiceProcess:
        assert command is None
        owner_name, other_name = self._names
        if self._standby is None:
            self._process = self.begun(owner_name)
        else:
            self._process, self._standby = self._standby, None
            self._process.wait_ready()
        self._standby = self.begun(other_name, "--standby")
        return self._process

    def end(self) -> None:
        if self._process is not None:
            super().end()
            lost, kept = self._names
            shutil.rmtree(self.folder / lost, ignore_errors=True)
            self._names = kept, lost

    def stand_alone(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.__exit__(None, None, None)

    def close(self) -> None:
        super().close()
        self.stand_alone()


async def live_and_die(
    home: Home,
    place: BrokerPlace,
    producers: Sequence[IdempotentProducer],
    deaths: Sequence[Death],
    *,
    group: StandingGroup | None = None,
    reader: PollingGroup | None = None,
) -> None:
    """Let a service die and come back under its clients, and judge what it has at the end.

    `group` commits positions in all its lives, `reader` what it reads of the first topic.
    """
    reached = _Reached(producers)
    working: asyncio.Future[object] = asyncio.gather(*(p.run(reached.look) for p in producers))
    standing = None if group is None else asyncio.create_task(group.run())
    clients = [working] if standing is None else [working, standing]
    watching: list[asyncio.Future[None]] = []
    if reader is not None:
        reader.start()
    try:
        for death in deaths:
            reached.expect(death.acknowledged)
            await _live(home, place, death, reached, clients)
        service = await _last_life(home, place, clients, watching)
        if group is not None and standing is not None:
            await group.end(standing)
        with StorageClient(service.endpoint) as client:
            await asyncio.to_thread(judge_topics, client, producers)
        if reader is not None:
            read = [p for p in producers if p.topic == producers[0].topic]
            await asyncio.to_thread(reader.judge, {p.partition: p.values for p in read})
    finally:
        if reader is not None:
            await asyncio.to_thread(reader.end)
        for one in clients:
            one.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await asyncio.to_thread(home.close)
        await asyncio.gather(*watching)


class _Reached:
    """Set once so many batches more are acknowledged."""

    def __init__(self, producers: Sequence[IdempotentProducer]) -> None:
        self._producers = producers
        self._mark = 0
        self.event = asyncio.Event()

    def expect(self, more: int) -> None:
        self._mark = self._acknowledged() + more
        self.event.clear()
        self.look()

    def look(self) -> None:
        if self._acknowledged() >= self._mark:
            self.event.set()

    def _acknowledged(self) -> int:
        return sum(producer.acknowledged for producer in self._producers)


async def _live(
    home: Home,
    place: BrokerPlace,
    death: Death,
    reached: _Reached,
    clients: Sequence[asyncio.Future[object]],
) -> None:
    """Serve until enough is acknowledged or a client has ended, or the service has by itself.

    It does at its step; and where a busy machine has let its lease run out, and another took over.
    """
    command = None
    if death.step is not None:
        command = ("-m", "tests.torture.doomed_service", death.step, str(death.count))
    watching: list[asyncio.Future[object]] = [asyncio.create_task(reached.event.wait())]
    try:
        service = await asyncio.to_thread(home.start, command)
        watching.append(asyncio.create_task(asyncio.to_thread(service.wait_for_ever)))
        place.is_at(service.kafka_address)
        await _first_of([*watching, *clients])
    except DiedAtStart:
        # It reached the step while it completed what an earlier life had left.
        assert death.step is not None, "the service did not start"
    finally:
        place.is_gone()
        watching[0].cancel()
        await asyncio.to_thread(home.end)
        await asyncio.gather(*watching, return_exceptions=True)


async def _last_life(
    home: Home,
    place: BrokerPlace,
    clients: Sequence[asyncio.Future[object]],
    watching: list[asyncio.Future[None]],
) -> ServiceProcess:
    """Serve until all is acknowledged, and let nobody take over from then on.

    Each of `watching` is done when a process has ended.
    """
    working = clients[0]
    while True:
        service = await asyncio.to_thread(home.start)
        ended = asyncio.create_task(asyncio.to_thread(service.wait_for_ever))
        watching.append(ended)
        place.is_at(service.kafka_address)
        await _first_of([ended, *clients])
        if working.done():
            await asyncio.to_thread(home.stand_alone)
            if not ended.done():
                return service
        place.is_gone()
        await asyncio.to_thread(home.end)


async def _first_of(ends: Sequence[asyncio.Future[object]]) -> None:
    """Return when one of these is done; raises what it raised."""
    done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for one in done:
        one.result()


def _journal(tmp_path: Path, ack: str) -> tuple[str, ...]:
    return "--journal", f"file://{tmp_path / 'journal'}", "--journal-ack", ack


_HOMES: Final[dict[str, Callable[[Path], Home]]] = {
    "no journal": Home,
    "same disk, ack disk": lambda at: Home(at, *_journal(at, "disk")),
    "same disk, ack journal": lambda at: Home(at, *_journal(at, "journal")),
    "disk lost": lambda at: EmptyDiskHome(at, *_journal(at, "journal")),
    "takeover": lambda at: StandbyHome(at, *_journal(at, "journal")),
}


async def _run(home: Home, *, seed: int, batches: int, deaths: int) -> None:
    with StorageClient(home.start().endpoint) as client:
        create_topics(client)
    home.end()
    place = BrokerPlace()
    producers = topic_producers(place, batch_count=batches)
    drawn = drawn_deaths(
        seed,
        batch_count=sum(len(producer.batches) for producer in producers),
        deaths=deaths,
        at_steps=not isinstance(home, StandbyHome),
    )
    group = StandingGroup(producers[0], seed=seed)
    topic = producers[0].topic
    reader = PollingGroup(lambda: LibrdkafkaMember(home.brokers(), topic, "readers"))
    await live_and_die(home, place, producers, drawn, group=group, reader=reader)


@pytest.mark.parametrize("kind", [kind for kind in _HOMES if kind != "same disk, ack journal"])
async def test_every_acknowledged_record_is_stored_once_and_in_order(
    tmp_path: Path, kind: str
) -> None:
    """It dies, and again while its clients repeat what that interrupted."""
    await _run(_HOMES[kind](tmp_path), seed=1, batches=20, deaths=2)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", _HOMES)
async def test_many_deaths_leave_every_acknowledged_record_once_and_in_order(
    tmp_path: Path, kind: str, seed: int
) -> None:
    await _run(_HOMES[kind](tmp_path), seed=seed, batches=120, deaths=8)
