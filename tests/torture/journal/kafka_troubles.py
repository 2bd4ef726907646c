"""Troubles of Kafka consumers: topics made again under them, and members that crash and come anew.

A consumer that stays open reads every row of each table that a topic becomes, and a group whose
other members crash all the time goes on.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa
from confluent_kafka import Consumer

from streamhouse.core.errors import StreamhouseError, TableExistsError
from tests.support.kafka_group import LibrdkafkaMember
from tests.torture.writers import PATIENCE_S, Gate, Writer, patient_client

__all__ = ["CrashingMember", "RecreatedTopic"]

_SCHEMA: Final = pa.schema([pa.field("key", pa.binary()), pa.field("value", pa.binary())])
_NO_LAKE: Final = {"table.datalake.enabled": "false"}


class RecreatedTopic(Writer):
    """Drops a topic's table, makes and fills it again; a consumer that is open sees all its rows.

    Each call is a generation.
    """

    def __init__(self, gate: Gate, *, brokers: str, **common: Any) -> None:
        super().__init__(gate, **common)
        self._client = patient_client(self.endpoint)
        self._generation = 0
        self._create(0)
        self._member = LibrdkafkaMember(
            brokers, self.table, f"open-{self.name}", **{"topic.metadata.refresh.interval.ms": 500}
        )

    def write(self) -> int:
        self._generation += 1
        # As many rows as the table before, fewer, or more.
        count = self.random.choice((1, 7, 40, 40, 400))
        old_id = self._client.describe_table(self.table).table_id
        self._until_done(lambda: self._client.drop_table(self.table, if_exists=True))
        self._until_done(lambda: self._create(old_id))
        values = [b"%d %d" % (self._generation, number) for number in range(count)]
        rows = pa.table({"key": [None] * count, "value": values}, schema=_SCHEMA)
        self._client.append(self.table, rows)
        self._see_all(values)
        return count

    def _see_all(self, values: list[bytes]) -> None:
        missing, deadline_s = set(values), time.monotonic() + 2 * PATIENCE_S
        while missing:
            missing -= {value for _, _, value in self._member.poll()}
            self._member.commit()
            assert time.monotonic() < deadline_s, (
                f"a consumer of {self.table} has not seen {len(missing)} of {len(values)} rows of"
                f" generation {self._generation}, such as {min(missing)!r}"
            )

    def _create(self, old_id: int) -> None:
        try:
            self._client.create_table(self.table, _SCHEMA, bucket_count=1, properties=_NO_LAKE)
        except TableExistsError:
            # An attempt that was not answered has made it.
            assert self._client.describe_table(self.table).table_id != old_id

    def _until_done(self, call: Callable[[], object]) -> None:
        deadline_s, pause = time.monotonic() + PATIENCE_S, threading.Event()
        while True:
            try:
                call()
                return
            except StreamhouseError:
                if time.monotonic() > deadline_s:
                    raise
            pause.wait(0.1)


class CrashingMember(threading.Thread):
    """Joins a group again and again, and crashes at any moment: it never leaves or commits."""

    def __init__(self, brokers: str, topic: str, group: str, *, seed: int) -> None:
        super().__init__(name="crashing member", daemon=True)
        self._settings = {
            "bootstrap.servers": brokers,
            "group.id": group,
            "enable.auto.commit": False,
            "session.timeout.ms": 6_000,
            "log_level": 0,
        }
        self._topic = topic
        self._random = random.Random(seed)
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.is_set():
            consumer = Consumer(self._settings)
            consumer.subscribe([self._topic])
            end_s = time.monotonic() + self._random.choice((0.2, 1.5, 4.0))
            while time.monotonic() < end_s and not self._is_over.is_set():
                consumer.poll(0.1)
            # Its connections end, and it says nothing.
            del consumer
            self._is_over.wait(self._random.choice((0.0, 1.0)))

    def end(self) -> None:
        """End it."""
        self._is_over.set()
        self.join()
