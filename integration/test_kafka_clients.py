"""Clients of Kafka that know nothing of us produce, consume, share topics and survive kills."""

from __future__ import annotations

import json
import random
import ssl
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient

from integration.judges import debian_command
from integration.judges.kafka_clients import (
    CLIENTS,
    COMPRESSIONS,
    Headers,
    Kcat,
    Librdkafka,
    Read,
    Record,
)
from integration.kafka_topics import (
    FORGETFUL,
    changes_in_lake_and_log,
    create_topic,
    records_in_lake_and_log,
)
from streamhouse.api.client import StreamhouseClient
from tests.support.certificates import make_certificates
from tests.support.free_ports import free_port
from tests.support.kafka_group import LibrdkafkaMember, PollingGroup
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

MIRROR = Path(__file__).parents[1] / "examples" / "mirror_topic.py"
TOKEN = "a-token-of-a-service"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("kafka"), "--kafka-port", "0") as opened:
        yield opened


def _by_partition(found: list[Read]) -> dict[int, list[Read]]:
    parts: dict[int, list[Read]] = defaultdict(list)
    for read in found:
        parts[read.partition].append(read)
    return parts


def _headers(number: int, *, null: bytes | None = None) -> Headers:
    """None, one, or several: of one name, without a value, with an empty one, of any bytes."""
    many = (("a", b"1"), ("a", b"\xff\0"), ("\u00e9", null), ("empty", b""))
    return ((), (("trace", b"%d" % number),), many)[number % 3]


@pytest.mark.parametrize("writer", CLIENTS)
def test_what_a_client_writes_every_client_reads(service: ServiceProcess, writer: str) -> None:
    """Keys, values, timestamps and headers, with each compression."""
    brokers, topic = service.kafka_address, f"written-by.{writer}"
    create_topic(brokers, topic, 2)
    client = CLIENTS[writer](brokers)
    records: list[Record] = []
    for compression in COMPRESSIONS:
        more = [
            Record(
                None if n % 5 == 4 else b"k%d" % (n % 7),
                f"{compression} {n}".encode() * (n % 40),
                1_600_000_000_000 + len(records) + n,
                _headers(n, null=None if client.writes_null_headers else b"null"),
            )
            for n in range(300)
        ]
        assert len(client.produce(topic, more, compression=compression)) == len(more)
        records += more

    whole: dict[str, list[Read]] = {}
    for reader, make in CLIENTS.items():
        found = make(brokers).consume(topic, len(records), group=f"of-{reader}")
        whole[reader] = sorted(found, key=lambda read: read[:2])

    for found in whole.values():
        assert found == whole[writer]
        # Every record has a time of its own.
        assert (
            sorted((Record(*read[2:]) for read in found), key=lambda r: r.timestamp_ms) == records
        )
        for part in _by_partition(found).values():
            assert [read.offset for read in part] == list(range(len(part)))


def _changes(found: list[Read]) -> list[tuple[Any, Any]]:
    return [(json.loads(r.key or b""), r.value and json.loads(r.value)) for r in found]


@pytest.mark.end_to_end
@pytest.mark.parametrize("kind", CLIENTS)
def test_a_group_goes_on_where_it_stood(service: ServiceProcess, kind: str) -> None:
    brokers, topic = service.kafka_address, f"groups-{kind}"
    create_topic(brokers, topic)
    records = [Record(b"k", b"%d" % number) for number in range(100)]
    Librdkafka(brokers).produce(topic, records)
    client = CLIENTS[kind](brokers)

    first = client.consume(topic, 40, group=f"walkers-{kind}")
    rest = client.consume(topic, 60, group=f"walkers-{kind}")

    assert [read.offset for read in first + rest] == list(range(100))
    with StreamhouseClient(service.endpoint) as streamhouse:
        (consumer,) = streamhouse.consumers(f"groups_{kind.replace('-', '_')}")
        assert (consumer["name"], consumer["lag_rows"]) == (f"walkers-{kind}", 0)


def test_members_share_the_partitions_of_a_topic(service: ServiceProcess) -> None:
    brokers, topic = service.kafka_address, "shared"
    create_topic(brokers, topic, 4)
    settings = {
        "bootstrap.servers": brokers,
        "group.id": "sharers",
        "auto.offset.reset": "earliest",
        "session.timeout.ms": 6_000,
    }
    counts: dict[int, int] = {}

    def assigned(*members: Consumer) -> list[int]:
        return [len(member.assignment()) for member in members]

    def poll_until(done: Any, *members: Consumer) -> None:
        give_up = threading.Event()
        timer = threading.Timer(60, give_up.set)
        timer.start()
        while not done():
            assert not give_up.is_set(), assigned(*members)
            for member in members:
                message = member.poll(0.05)
                if message is not None and not message.error():
                    number = int(message.value())
                    counts[number] = counts.get(number, 0) + 1
        timer.cancel()

    first, second = Consumer(settings), Consumer(settings)
    first.subscribe([topic])
    poll_until(lambda: assigned(first) == [4], first)
    second.subscribe([topic])
    poll_until(lambda: sorted(assigned(first, second)) == [2, 2], first, second)
    producer = Producer({"bootstrap.servers": brokers})
    for number in range(400):
        producer.produce(topic, str(number), partition=number % 4)
    assert producer.flush(30) == 0
    poll_until(lambda: len(counts) == 400, first, second)
    second.close()
    poll_until(lambda: assigned(first) == [4], first)
    first.close()

    assert set(counts.values()) == {1}


@pytest.mark.parametrize("kind", CLIENTS)
def test_changes_are_written_and_read_as_debeziums(service: ServiceProcess, kind: str) -> None:
    """The same envelopes in and out, so a table can follow another one by its changes."""
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])
    debezium = {f"kafka.{of}.format": "debezium-json" for of in ("value", "changes")}
    topic = f"changes_{kind.replace('-', '_')}"
    ada, ann, bo = ({"id": n, "name": name} for n, name in ((1, "Ada"), (1, "Ann"), (2, "Bo")))
    changes = [("c", None, ada), ("c", None, bo), ("u", ada, ann), ("d", bo, None)]
    with StreamhouseClient(service.endpoint) as streamhouse:
        streamhouse.create_table(topic, schema, primary_key=["id"], properties=debezium)
        client = CLIENTS[kind](service.kafka_address)
        records = [
            Record(None, json.dumps({"op": op, "before": before, "after": after}).encode())
            for op, before, after in changes
        ]
        client.produce(topic, records)
        assert streamhouse.read(topic).to_pylist() == [ann]

    found = [(key, value) for key, value in _changes(client.consume(topic, 4))]
    assert [(c["op"], c.get("before"), c.get("after")) for _, c in found] == changes
    assert [key["id"] for key, _ in found] == [1, 2, 1, 2]


def test_a_bad_record_is_refused_by_its_reason(service: ServiceProcess) -> None:
    with StreamhouseClient(service.endpoint) as streamhouse:
        streamhouse.create_table("strict", pa.schema([("n", pa.int64())]))
        errors: list[str] = []
        producer = Producer({"bootstrap.servers": service.kafka_address})
        producer.produce(
            "strict", '{"n": "five"}', on_delivery=lambda error, _: errors.append(str(error))
        )
        assert producer.flush(30) == 0

        assert len(errors) == 1
        assert "INVALID_RECORD" in errors[0]
        assert streamhouse.read("strict").num_rows == 0


def test_a_consumer_reads_from_the_lake_into_the_log(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path, *FORGETFUL) as service:
        records = records_in_lake_and_log(service, "years")

        for name, make in CLIENTS.items():
            found = make(service.kafka_address).consume("years", len(records), group=name)
            assert [read.offset for read in found] == list(range(len(records)))
            assert [Record(*read[2:]) for read in found] == records


def test_a_consumer_reads_changes_from_the_lake_into_the_log(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path, *FORGETFUL) as service:
        changes = changes_in_lake_and_log(service, "people")

        for name, make in CLIENTS.items():
            found = make(service.kafka_address).consume("people", len(changes), group=name)
            assert _changes(found) == changes


@pytest.mark.parametrize("protocol", ["SASL_PLAINTEXT", "SASL_SSL"])
def test_a_token_is_a_password(tmp_path: Path, protocol: str) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    arguments = ["--kafka-port", "0", "--token-file", str(tmp_path / "token")]
    dotted = {"security.protocol": protocol, "sasl.mechanism": "PLAIN", "sasl.username": "app"}
    underscored: dict[str, Any] = {
        "security_protocol": protocol,
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": "app",
        "sasl_plain_password": TOKEN,
    }
    if protocol == "SASL_SSL":
        files = make_certificates(tmp_path / "tls", host="IP:127.0.0.1")
        arguments += ["--tls-cert", str(files.certificate), "--tls-key", str(files.key)]
        dotted["ssl.ca.location"] = str(files.ca)
        underscored["ssl_context"] = ssl.create_default_context(cafile=files.ca)
    with ServiceProcess(tmp_path / "data", *arguments) as service:
        brokers = service.kafka_address
        create_topic(brokers, "secret", **dotted, **{"sasl.password": TOKEN})
        for number, (name, make) in enumerate(CLIENTS.items(), 1):
            own = {**dotted, "sasl.password": TOKEN} if make is Librdkafka else underscored
            assert make(brokers, **own).produce("secret", [Record(b"k", name.encode())])
            found = make(brokers, **own).consume("secret", number, group=name)
            assert [read.value for read in found] == [c.encode() for c in list(CLIENTS)[:number]]
        wrong = AdminClient({"bootstrap.servers": brokers, **dotted, "sasl.password": "other"})
        with pytest.raises(Exception, match=r"_TRANSPORT|_TIMED_OUT|_AUTHENTICATION|SASL"):
            wrong.list_topics(timeout=3)


def test_kcat_lists_writes_and_reads(service: ServiceProcess) -> None:
    command = debian_command.kcat()
    if command is None:
        pytest.skip("kcat is not on PATH, and apt-get download has none")
    kcat = Kcat(command, service.kafka_address)
    kcat.produce("by_kcat", ["a:1", "b:2"])
    assert kcat.consume("by_kcat") == ["a:1", "b:2"]
    assert 'topic "by_kcat" with 1 partitions' in kcat.list_topics()


def _mirror(old: str, topic: str, new: str, count: int) -> None:
    """Run the program of docs/kafka.md until it has copied so many records."""
    mirror = subprocess.Popen(
        [sys.executable, str(MIRROR), old, topic, new], stdout=subprocess.PIPE, text=True
    )
    assert mirror.stdout is not None
    copied = 0
    while copied < count:
        copied += int(mirror.stdout.readline().split()[1])
    mirror.terminate()
    assert mirror.wait(60) == 0
    mirror.stdout.close()


def test_a_topic_is_mirrored_and_goes_on_where_it_was(
    service: ServiceProcess, tmp_path: Path
) -> None:
    """Between two services, both of which speak Kafka."""
    old, topic = service.kafka_address, "moved"
    records = [
        Record(b"k%d" % (n % 9), b"v%d" % n, 1_600_000_000_000 + n, _headers(n))
        for n in range(2_000)
    ]
    with ServiceProcess(tmp_path, "--kafka-port", "0") as target:
        for brokers in (old, target.kafka_address):
            create_topic(brokers, topic, 2)
        for part in (records[:1_500], records[1_500:]):
            Librdkafka(old).produce(topic, part)
            _mirror(old, topic, target.kafka_address, len(part))

        whole = [
            sorted(Librdkafka(brokers).consume(topic, 2_000, group="compare"), key=lambda r: r[:2])
            for brokers in (old, target.kafka_address)
        ]
    assert whole[0] == whole[1]
    assert sorted((Record(*r[2:]) for r in whole[1]), key=lambda r: r.timestamp_ms) == records


def test_a_topic_is_mirrored_into_a_table_by_key(service: ServiceProcess, tmp_path: Path) -> None:
    old, topic = service.kafka_address, "keyed"
    create_topic(old, topic, 2)
    last = {n % 90: n for n in range(2_000)}
    with (
        ServiceProcess(tmp_path, "--kafka-port", "0") as target,
        StreamhouseClient(target.endpoint) as streamhouse,
    ):
        schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("n", pa.int64())])
        streamhouse.create_table(topic, schema, primary_key=["id"], bucket_count=2)
        records = [
            Record(json.dumps({"id": n % 90}).encode(), json.dumps({"n": n}).encode())
            for n in range(2_000)
        ]
        records += [Record(json.dumps({"id": gone}).encode(), None) for gone in range(10)]
        for part in (records[:1_500], records[1_500:]):
            Librdkafka(old).produce(topic, part)
            _mirror(old, topic, target.kafka_address, len(part))

        rows = streamhouse.read(topic).to_pylist()
    assert {row["id"]: row["n"] for row in rows} == {key: n for key, n in last.items() if key >= 10}
    assert len(rows) == 80


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_acknowledged_record_is_there_once_after_kills(tmp_path: Path, seed: int) -> None:
    """A producer and a group go on while their service is killed at random and started again."""
    random_ = random.Random(seed)
    port = str(free_port())
    topic, count = "killed", 30_000
    acknowledged: set[int] = set()
    failed: list[str] = []

    def delivered(error: Any, message: Any) -> None:
        if error is None:
            acknowledged.add(int(message.value()))
        else:
            failed.append(str(error))

    with ServiceProcess(tmp_path, "--kafka-port", port) as service:
        brokers = service.kafka_address
        create_topic(brokers, topic, 3)
        group = PollingGroup(lambda: LibrdkafkaMember(brokers, topic, "readers"))
        group.start()
        producer = Producer(
            {
                "bootstrap.servers": brokers,
                "enable.idempotence": True,
                "linger.ms": 1,
                "batch.num.messages": 200,
                "reconnect.backoff.max.ms": 200,
                "message.timeout.ms": 120_000,
            }
        )
        kill_at = sorted(random_.sample(range(1_000, count), 4))

        def send(numbers: range) -> None:
            for number in numbers:
                while True:
                    try:
                        producer.produce(
                            topic, str(number), partition=number % 3, on_delivery=delivered
                        )
                        break
                    except BufferError:
                        producer.poll(0.1)
                producer.poll(0)

        start = 0
        for end in kill_at:
            send(range(start, end))
            start = end
            service.kill()
            service.__exit__(None, None, None)
            service.__enter__()
            group.begin_anew()
        send(range(start, count))
        assert producer.flush(120) == 0

        assert failed == []
        assert len(acknowledged) == count
        with StreamhouseClient(service.endpoint) as streamhouse:
            rows = streamhouse.read(topic, columns=["value"])
        values = [int(value) for value in rows.column("value").to_pylist()]
        assert sorted(values) == list(range(count))
        group.judge({part: [b"%d" % n for n in range(part, count, 3)] for part in range(3)})
        group.end()


def test_clients_go_on_while_their_topic_moves_between_shards(tmp_path: Path) -> None:
    """Each record is acknowledged and read once, in order; the group goes on from its positions."""
    arguments = ("--shards", "2", "--kafka-port", "0", "--journal", f"file://{tmp_path / 'store'}")
    topic, count, moves = "moved", 4_000, 4
    with (
        ServiceProcess(tmp_path / "data", *arguments, is_executed=True) as service,
        StreamhouseClient(service.endpoint) as streamhouse,
    ):
        brokers = service.kafka_address
        create_topic(brokers, topic, 2)
        failed: list[str] = []
        producer = Producer(
            {
                "bootstrap.servers": brokers,
                "enable.idempotence": True,
                "batch.num.messages": 20,
                "topic.metadata.refresh.interval.ms": 1_000,
            }
        )

        def delivered(error: Any, _: Any) -> None:
            if error is not None:
                failed.append(str(error))

        def send(numbers: range) -> None:
            for number in numbers:
                producer.produce(topic, str(number), partition=number % 2, on_delivery=delivered)
                producer.poll(0)

        found: list[Read] = []
        client = Librdkafka(brokers)
        for move in range(moves):
            (shard,) = (t["shard"] for t in streamhouse.status()["tables"])
            moving = threading.Thread(
                target=streamhouse.move_table, args=(topic, "1" if shard == "0" else "0")
            )
            moving.start()
            send(range(count * move // moves, count * (move + 1) // moves))
            # Half of what is there by then is left to a member after the move.
            found += client.consume(topic, count // (2 * moves), group="movers")
            moving.join()
        assert producer.flush(60) == 0
        found += client.consume(topic, count - len(found), group="movers")

    assert failed == []
    for partition, reads in _by_partition(found).items():
        assert [read.offset for read in reads] == list(range(len(reads)))
        assert [int(read.value or b"") for read in reads] == list(range(partition, count, 2))
