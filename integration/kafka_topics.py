"""Topics that the tests of several Kafka clients read: most of a topic has left its log."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

import pyarrow as pa
from confluent_kafka.admin import AdminClient, NewTopic

from integration.judges.kafka_clients import Librdkafka, Record
from streamhouse.api.client import StreamhouseClient
from tests.support.expired_log import EXPIRING, expire_log
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

__all__ = [
    "FORGETFUL",
    "Change",
    "changes_in_lake_and_log",
    "create_topic",
    "records_in_lake_and_log",
]

FORGETFUL: Final = ("--kafka-port", "0", "--retention-interval-ms", "50")
"""Arguments of a service that takes rows out of the log as soon as it may."""


class Change(NamedTuple):
    """A record of a topic of changes: JSON's key, and value if it is not a tombstone."""

    key: dict[str, Any]
    value: dict[str, Any] | None


def create_topic(
    brokers: str,
    topic: str,
    partitions: int = 1,
    *,
    config: dict[str, str] | None = None,
    **settings: Any,
) -> None:
    """Make a topic as librdkafka's admin does; `settings` are the client's."""
    admin = AdminClient({"bootstrap.servers": brokers, **settings})
    (made,) = admin.create_topics([NewTopic(topic, partitions, 1, config=config or {})]).values()
    made.result(30)


def records_in_lake_and_log(service: ServiceProcess, topic: str) -> list[Record]:
    """Fill a topic of one partition whose log begins behind its first record; return all."""
    create_topic(service.kafka_address, topic, config=EXPIRING)
    records = [Record(b"k%d" % n, b"v%d" % n, 1_700_000_000_000 + n) for n in range(6_000)]
    writer = Librdkafka(service.kafka_address)
    # Retention takes whole segments, of which a batch is in one.
    for first in range(0, 5_000, 250):
        writer.produce(topic, records[first : first + 250])
    with StreamhouseClient(service.endpoint) as client:
        assert tier_once(client, topic) == 5_000
        writer.produce(topic, records[5_000:])
        (begin,) = expire_log(client, topic).values()
        assert 0 < begin <= 5_000
    return records


def changes_in_lake_and_log(service: ServiceProcess, topic: str) -> list[Change]:
    """As `records_in_lake_and_log`, of a table with a primary key; return its changes."""
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])
    properties = {**EXPIRING, "table.datalake.changelog": "true"}
    changes = [
        Change({"id": n % 500}, None if n % 7 == 6 else {"id": n % 500, "name": f"{n}" * 20})
        for n in range(6_000)
    ]
    records = [
        Record(json.dumps(key).encode(), value and json.dumps(value).encode())
        for key, value in changes
    ]
    writer = Librdkafka(service.kafka_address)
    with StreamhouseClient(service.endpoint) as client:
        client.create_table(topic, schema, primary_key=["id"], properties=properties)
        for first in range(0, 5_000, 250):
            writer.produce(topic, records[first : first + 250])
        assert tier_once(client, topic) > 0
        writer.produce(topic, records[5_000:])
        expire_log(client, topic)
    # A tombstone of a key that has no row changes nothing.
    found: list[Change] = []
    present: set[int] = set()
    for change in changes:
        key = change.key["id"]
        if change.value is not None:
            present.add(key)
        elif key in present:
            present.remove(key)
        else:
            continue
        found.append(change)
    return found
