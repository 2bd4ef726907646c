"""An era of a service with a journal under Kafka clients: librdkafka's producers and a group.

One machine dies in every way that others do. With `--journal-ack journal` its disk is gone after
every other death; with `disk` it is kept. When all is quiet every record that was acknowledged is
there once, at the offset that was told, in its producer's order, and nothing else is. The group
sees dense offsets, the same records whenever it sees them again, and never begins below where it
has committed; another member of it crashes and comes anew all the time. A topic is made again under
a consumer that stays open and sees all rows of each table (kafka_troubles.py).
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from confluent_kafka import Message, Producer

from streamhouse.api.client import StreamhouseClient
from streamhouse.core.model.changelog import INSERT, UPDATE_AFTER
from streamhouse.core.model.records.record_format import RAW_TOPIC
from tests.support.free_ports import free_port
from tests.support.journal_machines import JournalHome, Machine
from tests.support.kafka_group import LibrdkafkaMember, PollingGroup
from tests.torture.era import Report
from tests.torture.journal.eras import LIMITS, LostDiskEra
from tests.torture.journal.kafka_troubles import CrashingMember, RecreatedTopic
from tests.torture.writers import PATIENCE_S, Gate, Writer

__all__ = ["KafkaEra"]

_RAW: Final = "raw"
_KEYED: Final = "keyed"
_BUCKETS: Final = 3
_KEYS: Final = 50
_SCHEMAS: Final = {
    _RAW: pa.schema(RAW_TOPIC),
    _KEYED: pa.schema(
        [pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())]
    ),
}
_NO_LAKE: Final = {"table.datalake.enabled": "false", "table.log.segment-bytes": "64kb"}
# Each attempt to connect to a service that is dead would be a line.
_CLIENT: Final = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 200, "log_level": 0}


class KafkaEra(LostDiskEra):
    """See the module."""

    def __init__(
        self, directory: Path, chance: random.Random, report: Report, home: JournalHome
    ) -> None:
        super().__init__(directory, chance, report, home)
        port = free_port()
        self._brokers = f"127.0.0.1:{port}"
        self._keeps_disk = chance.random() < 0.3
        ack = "disk" if self._keeps_disk else "journal"
        self._machine = Machine(
            home, "one", *LIMITS, "--kafka-port", str(port), "--journal-ack", ack
        )
        self._endpoint = self._machine.endpoint
        self._group: PollingGroup | None = None
        self._crashing: CrashingMember | None = None

    def run(self, lives: int) -> None:
        try:
            super().run(lives)
        finally:
            if self._crashing is not None:
                self._crashing.end()
            if self._group is not None:
                self._group.end()

    def _prepare(self) -> None:
        with StreamhouseClient(self._endpoint) as client:
            client.create_table(_RAW, _SCHEMAS[_RAW], bucket_count=_BUCKETS, properties=_NO_LAKE)
            client.create_table(
                _KEYED,
                _SCHEMAS[_KEYED],
                primary_key=["key"],
                bucket_count=_BUCKETS,
                properties=_NO_LAKE,
            )
        for topic in (_RAW, _RAW, _KEYED, _KEYED):
            self._writers.append(
                _KafkaWriter(
                    self._gate,
                    brokers=self._brokers,
                    endpoint=self._endpoint,
                    table=topic,
                    number=len(self._writers),
                    seed=self._random.getrandbits(32),
                )
            )
        self._group = PollingGroup(
            lambda: LibrdkafkaMember(self._brokers, _RAW, "torture"), patience_s=PATIENCE_S
        )
        self._group.start()
        self._crashing = CrashingMember(
            self._brokers, _RAW, "torture", seed=self._random.getrandbits(32)
        )
        self._crashing.start()
        self._writers.append(
            RecreatedTopic(
                self._gate,
                brokers=self._brokers,
                endpoint=self._endpoint,
                table="recreated",
                number=len(self._writers),
                seed=self._random.getrandbits(32),
            )
        )

    def _keep_workers(self) -> None:
        """The tables have no lake."""

    def _judge_cuts_until(self, is_over: Callable[[], bool], seconds: float) -> None:
        if not self._is_clean:
            self._trouble_store()
        deadline_s = time.monotonic() + seconds
        pause = threading.Event()
        while not is_over() and time.monotonic() < deadline_s:
            pause.wait(0.02)

    def _befall_disk(self) -> None:
        if not self._keeps_disk:
            super()._befall_disk()

    def _judge_all(self) -> None:
        """Judge when all is quiet."""
        assert self._gate.wait_until_empty(PATIENCE_S), (
            f"records of {[w.name for w in self._writers if w.is_inside]} were never acknowledged:"
            f" {self._machine.log_text()[-4_000:]}"
        )
        self._raise_errors()
        self._judge(is_quiet=True)
        assert self._group is not None
        if self._random.random() < 0.3:
            self._group.begin_anew()

    def _judge(self, *, is_quiet: bool) -> None:
        writers = [writer for writer in self._writers if isinstance(writer, _KafkaWriter)]
        with StreamhouseClient(self._endpoint) as client:
            raw = _logged(client, _RAW)
            changes = [row for rows in _logged(client, _KEYED).values() for row in rows]
        self._report.rows_judged += len(changes) + sum(map(len, raw.values()))
        _judge_log(raw, [writer for writer in writers if writer.table == _RAW])
        _judge_keys(changes, [writer for writer in writers if writer.table == _KEYED])
        assert self._group is not None
        self._group.judge({b: [row["value"] for row in rows] for b, rows in raw.items()})

    def _last_judgement(self) -> None:
        with self._service(None):
            self._judge(is_quiet=True)


def _logged(client: StreamhouseClient, table: str) -> dict[int, list[dict[str, Any]]]:
    return {
        bucket: [
            row
            for batch in client.read_range(table, bucket, 0, positions.high_watermark)
            for row in batch.data.to_pylist()
        ]
        for bucket, positions in client.table_state(table).positions.items()
    }


def _judge_log(logged: dict[int, list[dict[str, Any]]], writers: list[_KafkaWriter]) -> None:
    for bucket, rows in logged.items():
        places: dict[bytes, int] = {}
        for offset, row in enumerate(rows):
            before = places.setdefault(row["value"], offset)
            assert before == offset, f"{row['value']!r} is at {before} and {offset} of {bucket}"
        told: set[bytes] = set()
        for writer in writers:
            for value, offset in writer.acknowledged[bucket]:
                assert places.get(value) == offset, (
                    f"{value!r} was acknowledged at {offset} of {bucket}, and is at"
                    f" {places.get(value)}"
                )
                told.add(value)
            offsets = [offset for _, offset in writer.acknowledged[bucket]]
            assert offsets == sorted(offsets), f"{writer.name} is out of order in {bucket}"
        assert told == places.keys(), f"nobody sent {sorted(places.keys() - told)[:5]}"


def _judge_keys(changes: list[dict[str, Any]], writers: list[_KafkaWriter]) -> None:
    found: dict[bytes, list[bytes]] = defaultdict(list)
    for row in changes:
        if row["__change_type"] in (INSERT, UPDATE_AFTER):
            found[row["key"]].append(row["value"])
    expected: dict[bytes, list[bytes]] = defaultdict(list)
    for writer in writers:
        for told in writer.acknowledged.values():
            for value, _ in told:
                expected[value.split()[0]].append(value)
    wrong = [key for key in {*found, *expected} if found[key] != expected[key]]
    assert not wrong, f"key {wrong[0]!r} was {found[wrong[0]]}, sent was {expected[wrong[0]]}"


class _KafkaWriter(Writer):
    """Produces records of one topic, and waits until all are acknowledged.

    A record of the keyed topic has a key of the writer's own, always in the same partition.
    """

    def __init__(self, gate: Gate, *, brokers: str, **common: Any) -> None:
        super().__init__(gate, **common)
        self.acknowledged: dict[int, list[tuple[bytes, int]]] = defaultdict(list)
        """By partition, in the order in which they were: value and offset."""
        self._refused: list[str] = []
        self._sent = 0
        self._producer = Producer(
            {
                **_CLIENT,
                "bootstrap.servers": brokers,
                "enable.idempotence": True,
                "linger.ms": self.random.choice((0, 1, 5)),
                "batch.num.messages": self.random.choice((3, 20, 200)),
                "compression.type": self.random.choice(("none", "lz4", "zstd")),
                # How long is too long is judged when the service is there again.
                "message.timeout.ms": int(5 * PATIENCE_S * 1_000),
                "retry.backoff.ms": 20,
                "request.timeout.ms": 10_000,
                "socket.timeout.ms": 10_000,
            }
        )

    def write(self) -> int:
        count = self.random.choice((1, 5, 50, 300))
        for _ in range(count):
            self._sent += 1
            key = self.random.randrange(_KEYS)
            name = b"%d-%d" % (self.number, key)
            self._producer.produce(
                self.table,
                b"%s %d %s" % (name, self._sent, self.text().encode()),
                name,
                partition=key % _BUCKETS,
                on_delivery=self._delivered,
            )
            self._producer.poll(0)
        left = self._producer.flush(5 * PATIENCE_S)
        assert not left, f"{left} records were not acknowledged"
        assert not self._refused, f"{len(self._refused)} records: {self._refused[0]}"
        return count

    def _delivered(self, error: Any, message: Message) -> None:
        if error is not None:
            self._refused.append(str(error))
            return
        told = self.acknowledged[message.partition()]
        told.append((message.value() or b"", message.offset()))
