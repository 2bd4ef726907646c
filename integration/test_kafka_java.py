"""Kafka's Java client produces, consumes in groups, administers and goes on after kills."""

from __future__ import annotations

import json
import random
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pytest

from integration.judges.engines import ROOT
from integration.judges.environment import judge_python
from integration.kafka_topics import (
    FORGETFUL,
    changes_in_lake_and_log,
    records_in_lake_and_log,
)
from streamhouse.api.client import StreamhouseClient
from tests.support.certificates import make_certificates
from tests.support.free_ports import free_port
from tests.support.kafka_group import PollingGroup
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.slow, pytest.mark.judge, pytest.mark.timeout(600)]

COMPRESSIONS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
TOKEN: Final = "a-token-of-a-service"
_PATIENCE_S: Final = 60.0


class Read(NamedTuple):
    """A record as the client was given it: texts whose characters are bytes."""

    partition: int
    offset: int
    key: str | None
    value: str | None
    timestamp_ms: int
    headers: list[list[str | None]]


class JavaClient:
    """A process with Kafka's Java client; entering starts it, leaving ends it."""

    def __init__(self, brokers: str, **settings: str) -> None:
        self._arguments = [brokers, json.dumps(settings)]

    def __enter__(self) -> JavaClient:
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [str(judge_python("cdc")), "-m", "integration.judges.kafka_java", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._log:
            self._process.kill()
            self._process.communicate()

    def do(
        self, command: str, *, on_sent: Callable[[int], None] | None = None, **words: Any
    ) -> Any:
        """Give a command, wait for its answer; `on_sent` is told how far a `produce` is."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": command, **words}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            said = json.loads(line)
            if "sent" not in said:
                assert "error" not in said, said["error"]
                return said["answer"]
            if on_sent is not None:
                on_sent(said["sent"])
        self._log.seek(0)
        raise AssertionError(f"the Java client ended: {self._log.read()[-4_000:]}")

    def poll(self, member: str) -> list[Read]:
        """Wait a moment for a member's records."""
        return [Read(*read) for read in self.do("poll", member=member)["records"]]

    def poll_until(self, done: Callable[[], bool], members: dict[str, Any]) -> list[Read]:
        """Poll members in turn until it is so; return the records. Sets their partitions."""
        found: list[Read] = []
        give_up = time.monotonic() + _PATIENCE_S
        while not done():
            assert time.monotonic() < give_up, members
            for member in members:
                polled = self.do("poll", member=member)
                members[member] = polled["partitions"]
                found += [Read(*read) for read in polled["records"]]
        return found

    def consume(self, topic: str, count: int, *, group: str, most: int = 500) -> list[Read]:
        """Read at least so many records, at most `most` a poll, and commit."""
        self.do("join", member="one", topic=topic, group=group, **{"max.poll.records": most})
        found: list[Read] = []
        give_up = time.monotonic() + _PATIENCE_S
        while len(found) < count:
            assert time.monotonic() < give_up, len(found)
            found += self.poll("one")
        self.do("commit", member="one")
        self.do("leave", member="one")
        return found


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("kafka"), "--kafka-port", "0") as opened:
        yield opened


@pytest.fixture(scope="module")
def java(service: ServiceProcess) -> Iterator[JavaClient]:
    with JavaClient(service.kafka_address) as opened:
        yield opened


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_what_is_produced_is_consumed(java: JavaClient, compression: str) -> None:
    topic = f"written-with.{compression}"
    java.do("create", topic=topic, partitions=2)
    headers = [[], [["trace", "1"]], [["a", "1"], ["a", "\xff\0"], ["\u00e9", None], ["empty", ""]]]
    records = [
        (
            *(None if n % 5 == 4 else f"k{n % 7}", f"\xff{n} " * (n % 40), n % 2),
            *(1_600_000_000_000 + n, headers[n % 3]),
        )
        for n in range(1_000)
    ]

    settings = {"compression.type": compression}
    places = java.do("produce", topic=topic, records=records, **settings)
    found = java.consume(topic, len(records), group="readers")

    expected = [
        (*place, key, value, *rest)
        for place, (key, value, _, *rest) in zip(places, records, strict=True)
    ]
    assert sorted(found, key=lambda read: read[:2]) == sorted(expected, key=lambda read: read[:2])
    for part in (0, 1):
        assert [read.offset for read in found if read.partition == part] == list(range(500))


def test_a_group_goes_on_where_it_committed(service: ServiceProcess, java: JavaClient) -> None:
    java.do("create", topic="walked", partitions=1)
    java.do("produce", topic="walked", records=[("k", str(n), None) for n in range(100)])

    first = java.consume("walked", 40, group="walkers", most=20)
    rest = java.consume("walked", 60, group="walkers", most=20)

    assert len(first) == 40
    assert [read.offset for read in first + rest] == list(range(100))
    with StreamhouseClient(service.endpoint) as streamhouse:
        (consumer,) = streamhouse.consumers("walked")
        assert (consumer["name"], consumer["lag_rows"]) == ("walkers", 0)


@pytest.mark.parametrize("count", [3, 8])
def test_an_open_consumer_reads_all_of_a_topic_that_was_made_again(
    service: ServiceProcess, java: JavaClient, count: int
) -> None:
    table, schema = f"again_{count}", pa.schema([pa.field("value", pa.binary())])

    def make(first: int, rows: int) -> list[str]:
        values = [str(number) for number in range(first, first + rows)]
        streamhouse.create_table(table, schema, bucket_count=1)
        streamhouse.append(table, pa.table({"value": [v.encode() for v in values]}, schema=schema))
        return values

    def read(rows: int) -> list[str | None]:
        found: list[Read] = []
        give_up = time.monotonic() + _PATIENCE_S
        while len(found) < rows:
            assert time.monotonic() < give_up, found
            found += java.poll("open")
        return [one.value for one in found]

    with StreamhouseClient(service.endpoint) as streamhouse:
        before = make(0, count)
        java.do("join", member="open", topic=table, group=table)
        assert read(count) == before
        java.do("commit", member="open")
        streamhouse.drop_table(table)
        after = make(100, 8)
        assert read(8) == after
        java.do("commit", member="open")
        java.do("leave", member="open")
        (consumer,) = streamhouse.consumers(table)
        assert consumer["lag_rows"] == 0


@pytest.mark.parametrize("assignor", ["Range", "CooperativeSticky"])
def test_members_share_the_partitions_of_a_topic(java: JavaClient, assignor: str) -> None:
    topic = f"shared-{assignor}"
    java.do("create", topic=topic, partitions=4)
    settings = {
        "partition.assignment.strategy": f"org.apache.kafka.clients.consumer.{assignor}Assignor"
    }
    first: dict[str, list[int]] = {"first": []}
    both: dict[str, list[int]] = {"first": [], "second": []}

    java.do("join", member="first", topic=topic, group=topic, **settings)
    java.poll_until(lambda: first["first"] == [0, 1, 2, 3], first)
    java.do("join", member="second", topic=topic, group=topic, **settings)
    java.poll_until(lambda: [len(parts) for parts in both.values()] == [2, 2], both)
    assert sorted(both["first"] + both["second"]) == [0, 1, 2, 3]
    java.do("produce", topic=topic, records=[("k", str(n), n % 4) for n in range(400)])
    seen: Counter[int] = Counter()
    give_up = time.monotonic() + _PATIENCE_S
    while seen.total() < 400:
        assert time.monotonic() < give_up, seen.total()
        for member in both:
            seen.update(int(read.value or "") for read in java.poll(member))
    java.do("commit", member="first")
    java.do("commit", member="second")
    java.do("leave", member="second")
    first["first"] = []
    again = java.poll_until(lambda: first["first"] == [0, 1, 2, 3], first)
    java.do("leave", member="first")

    assert again == []
    assert seen == Counter(range(400))


def test_rows_by_key_are_upserts_and_tombstones(service: ServiceProcess, java: JavaClient) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])
    with StreamhouseClient(service.endpoint) as streamhouse:
        streamhouse.create_table("people", schema, primary_key=["id"])
        records = [
            ('{"id": 1}', '{"id": 1, "name": "Ada"}', None),
            ('{"id": 2}', '{"id": 2, "name": "Bo"}', None),
            ('{"id": 1}', '{"id": 1, "name": "Ann"}', None),
            ('{"id": 2}', None, None),
        ]
        places = java.do("produce", topic="people", records=records)
        offsets = [offset for _, offset in places]
        assert offsets == sorted(set(offsets))
        assert streamhouse.read("people").to_pylist() == [{"id": 1, "name": "Ann"}]

    found = java.consume("people", 4, group="readers")

    assert _changes(found) == [
        ({"id": 1}, {"id": 1, "name": "Ada"}),
        ({"id": 2}, {"id": 2, "name": "Bo"}),
        ({"id": 1}, {"id": 1, "name": "Ann"}),
        ({"id": 2}, None),
    ]


def _changes(found: list[Read]) -> list[tuple[Any, Any]]:
    return [(json.loads(r.key or ""), r.value and json.loads(r.value)) for r in found]


def test_a_consumer_reads_from_the_lake_into_the_log(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path, *FORGETFUL) as service:
        records = records_in_lake_and_log(service, "years")
        changes = changes_in_lake_and_log(service, "people")

        with JavaClient(service.kafka_address) as java:
            found = java.consume("years", len(records), group="readers")
            changed = java.consume("people", len(changes), group="readers")

    assert [read.offset for read in found] == list(range(len(records)))
    assert [(r.key, r.value, r.timestamp_ms) for r in found] == [
        ((r.key or b"").decode(), (r.value or b"").decode(), r.timestamp_ms) for r in records
    ]
    assert _changes(changed) == changes


def test_a_bad_record_is_refused_by_its_reason(service: ServiceProcess, java: JavaClient) -> None:
    with StreamhouseClient(service.endpoint) as streamhouse:
        streamhouse.create_table("strict", pa.schema([("n", pa.int64())]))
        with pytest.raises(AssertionError, match=r"InvalidRecordException.*five"):
            java.do("produce", topic="strict", records=[(None, '{"n": "five"}', None)])
        assert streamhouse.read("strict").num_rows == 0


def test_a_consumer_makes_the_topic_that_it_asks_for(java: JavaClient) -> None:
    member: dict[str, list[int]] = {"first": []}
    java.do("join", member="first", topic="asked-for", group="askers")
    java.poll_until(lambda: member["first"] != [], member)
    java.do("leave", member="first")

    assert "asked-for" in java.do("topics")


def test_the_newer_group_protocol_is_refused_by_its_name(java: JavaClient) -> None:
    java.do("create", topic="newer", partitions=1)
    settings = {"group.protocol": "consumer"}
    java.do("join", member="newer", topic="newer", group="newer", **settings)
    with pytest.raises(AssertionError, match="UnsupportedVersionException"):
        java.poll_until(lambda: False, {"newer": []})
    java.do("leave", member="newer")


def test_transactions_are_refused_at_once(java: JavaClient) -> None:
    java.do("create", topic="transacted", partitions=1)
    settings = {"transactional.id": "mine"}
    with pytest.raises(AssertionError, match="TransactionalIdAuthorizationException"):
        java.do("produce", topic="transacted", records=[(None, "v", None)], **settings)


def test_offsets_are_found_by_time(java: JavaClient) -> None:
    java.do("create", topic="timed", partitions=1)
    java.do("produce", topic="timed", records=[(None, "before", None)] * 3)
    acknowledged = time.time_ns() // 1_000_000
    while (between := time.time_ns() // 1_000_000) == acknowledged:
        pass
    java.do("produce", topic="timed", records=[(None, "after", None)] * 2)
    later = between + 3_600_000

    java.do("join", member="timer", topic="timed", group="timers")
    of_middle = java.do("offsets", member="timer", topic="timed", partition=0, time_ms=between)
    of_later = java.do("offsets", member="timer", topic="timed", partition=0, time_ms=later)
    java.do("leave", member="timer")

    assert of_middle == {"first": 0, "end": 5, "at_time": 3}
    assert of_later == {"first": 0, "end": 5, "at_time": None}


def test_the_cluster_and_its_topics_are_described(
    service: ServiceProcess, java: JavaClient
) -> None:
    java.do("create", topic="short-lived", partitions=1)
    assert "short-lived" in java.do("topics")
    java.do("delete", topic="short-lived")

    assert "short-lived" not in java.do("topics")
    cluster = java.do("cluster")
    assert (cluster["controller"], cluster["brokers"]) == (0, [service.kafka_address])
    assert cluster["id"]


@pytest.mark.parametrize("protocol", ["SASL_PLAINTEXT", "SASL_SSL"])
def test_a_token_is_a_password(tmp_path: Path, protocol: str) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    arguments = ["--kafka-port", "0", "--token-file", str(tmp_path / "token")]
    trust: dict[str, str] = {}
    if protocol == "SASL_SSL":
        files = make_certificates(tmp_path / "tls", host="IP:127.0.0.1")
        arguments += ["--tls-cert", str(files.certificate), "--tls-key", str(files.key)]
        trust = {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(files.ca)}

    def settings(password: str) -> dict[str, str]:
        login = "org.apache.kafka.common.security.plain.PlainLoginModule"
        return {
            "security.protocol": protocol,
            "sasl.mechanism": "PLAIN",
            "sasl.jaas.config": f'{login} required username="app" password="{password}";',
            **trust,
        }

    with ServiceProcess(tmp_path / "data", *arguments) as service:
        with JavaClient(service.kafka_address, **settings(TOKEN)) as java:
            java.do("create", topic="secret", partitions=1)
            java.do("produce", topic="secret", records=[("k", "v", None)])
            (found,) = java.consume("secret", 1, group="readers")
            assert found[:4] == (0, 0, "k", "v")
        with (
            JavaClient(service.kafka_address, **settings("other")) as java,
            pytest.raises(AssertionError, match="SaslAuthenticationException"),
        ):
            java.do("topics")


class JavaMember:
    """A member of a group, for `PollingGroup`: in a process of its own."""

    def __init__(self, brokers: str, topic: str, group: str) -> None:
        self._java = JavaClient(brokers).__enter__()
        settings = {"session.timeout.ms": 6_000}
        self._java.do("join", member="one", topic=topic, group=group, **settings)
        self._ends: dict[int, int] = {}

    def poll(self) -> list[tuple[int, int, bytes]]:
        """See `GroupMember.poll`."""
        found = self._java.poll("one")
        self._ends.update({read.partition: read.offset + 1 for read in found})
        return [(r.partition, r.offset, (r.value or "").encode("latin-1")) for r in found]

    def commit(self) -> dict[int, int]:
        """See `GroupMember.commit`."""
        ends, self._ends = self._ends, {}
        try:
            self._java.do("commit", member="one")
        except AssertionError as error:
            # The group began anew while it was away, or nobody answered.
            if not re.search(r"CommitFailed|RebalanceInProgress|Timeout", str(error)):
                raise
            return {}
        return ends

    def close(self) -> None:
        """Die: the group goes on where it has committed."""
        self._java.__exit__(None, None, None)


@pytest.mark.parametrize("seed", [1, 2])
def test_every_acknowledged_record_is_there_once_after_kills(tmp_path: Path, seed: int) -> None:
    """A producer and a group go on while their service is killed at random and started again."""
    port = str(free_port())
    count = 30_000
    kill_at = sorted(random.Random(seed).sample(range(1_000, count), 4))
    records = [(None, str(number), number % 3) for number in range(count)]
    # A buffer of little room: what is sent is hardly more than what was acknowledged.
    settings = {
        "buffer.memory": 65_536,
        "batch.size": 2_048,
        "max.block.ms": 120_000,
        "delivery.timeout.ms": 120_000,
    }

    with ServiceProcess(tmp_path, "--kafka-port", port) as service:

        def kill_when_due(sent: int) -> None:
            if kill_at and sent >= kill_at[0]:
                del kill_at[0]
                service.kill()
                service.__exit__(None, None, None)
                service.__enter__()

        with JavaClient(service.kafka_address) as java:
            java.do("create", topic="killed", partitions=3)
            group = PollingGroup(lambda: JavaMember(service.kafka_address, "killed", "walkers"))
            group.start()
            places = java.do(
                "produce", topic="killed", records=records, on_sent=kill_when_due, **settings
            )
            found = java.consume("killed", count, group="readers")
        group.judge({p: [b"%d" % n for n in range(p, count, 3)] for p in range(3)})
        group.end()
        with StreamhouseClient(service.endpoint) as streamhouse:
            stored = streamhouse.read("killed", columns=["value"]).column("value").to_pylist()

    assert kill_at == []
    assert len(places) == count
    assert sorted(int(value) for value in stored) == list(range(count))
    for part in range(3):
        assert [int(r.value or "") for r in found if r.partition == part] == list(
            range(part, count, 3)
        )


def test_confluents_serializers_make_a_topic_of_avro(
    service: ServiceProcess, java: JavaClient
) -> None:
    schema = {
        "type": "record",
        "name": "Order",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "note", "type": ["null", "string"], "default": None},
        ],
    }
    registry = {"schema.registry.url": f"{service.endpoint}/kafka/registry"}
    notes = [None if n % 2 else {"string": f"n{n}"} for n in range(20)]
    sent = [(f"k{n}", json.dumps({"id": n, "note": note})) for n, note in enumerate(notes)]

    java.do(
        "produce_avro", topic="avro-orders", schema=json.dumps(schema), records=sent, **registry
    )

    reading = {
        "key.deserializer": "io.confluent.kafka.serializers.KafkaAvroDeserializer",
        "value.deserializer": "io.confluent.kafka.serializers.KafkaAvroDeserializer",
        **registry,
    }
    java.do("join", member="avro", topic="avro-orders", group="avro", **reading)
    found: list[Read] = []
    give_up = time.monotonic() + _PATIENCE_S
    while len(found) < len(sent):
        assert time.monotonic() < give_up, found
        found += java.poll("avro")
    java.do("leave", member="avro")
    values = [{"id": n, "note": note and note["string"]} for n, note in enumerate(notes)]
    assert sorted((read.key, json.loads(read.value or "")["id"]) for read in found) == sorted(
        (f"k{n}", n) for n in range(20)
    )
    with StreamhouseClient(service.endpoint) as streamhouse:
        rows = streamhouse.read("avro_orders").to_pylist()
    assert sorted(rows, key=lambda row: row["id"]) == [
        {**value, "key": f"k{n}"} for n, value in enumerate(values)
    ]
