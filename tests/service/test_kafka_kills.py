"""Kafka clients while the service is killed: each acknowledged record once, in order.

A group of librdkafka's reads and commits all the while: it is given every record, in order.

Without a journal, and with one: on the same disk in both ways of acknowledging; and with
`--journal-ack journal` also when each death takes the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from streamhouse.client import StorageClient
from tests.support.kafka_group import LibrdkafkaMember, PollingGroup
from tests.support.kafka_lives import (
    EmptyDiskHome,
    Home,
    StandbyHome,
    drawn_deaths,
    live_and_die,
)
from tests.support.kafka_producers import (
    BrokerPlace,
    StandingGroup,
    create_topics,
    topic_producers,
)

pytestmark = pytest.mark.slow


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
