"""librdkafka's admin asks for and changes topics and groups, and a group outlives its members."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator

import pytest
from confluent_kafka import (
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    OffsetSpec,
    ResourceType,
)

from integration.judges.kafka_clients import Librdkafka, Record
from integration.kafka_topics import create_topic
from streamhouse.api.client import StreamhouseClient
from tests.support.kafka_group import LibrdkafkaMember
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

_MEMBER = """
import sys
from confluent_kafka import Consumer
consumer = Consumer({
    "bootstrap.servers": sys.argv[1], "group.id": "mortals", "session.timeout.ms": 6_000,
    "auto.offset.reset": "earliest", "enable.auto.commit": False,
})
consumer.subscribe([sys.argv[2]])
while True:
    messages = consumer.consume(20, 0.2)
    for message in messages:
        print(message.partition(), message.offset(), message.value().decode(), flush=True)
    if messages:
        consumer.commit(asynchronous=False)
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("kafka"), "--kafka-port", "0") as opened:
        yield opened


@pytest.fixture
def admin(service: ServiceProcess) -> AdminClient:
    return AdminClient({"bootstrap.servers": service.kafka_address})


def _numbers(count: int) -> list[Record]:
    """Return records whose keys spread them over all partitions."""
    return [Record(b"%d" % number, b"%d" % number) for number in range(count)]


def _config(admin: AdminClient, topic: str) -> dict[str, str]:
    resource = ConfigResource(ResourceType.TOPIC, topic)
    (asked,) = admin.describe_configs([resource]).values()
    return {name: entry.value for name, entry in asked.result(30).items()}


def test_settings_of_a_topic_are_described_and_changed(
    service: ServiceProcess, admin: AdminClient
) -> None:
    create_topic(service.kafka_address, "configured", config={"retention.ms": "7200000"})
    before = _config(admin, "configured")

    changed = ConfigResource(
        ResourceType.TOPIC,
        "configured",
        incremental_configs=[
            ConfigEntry("retention.ms", "3600000", incremental_operation=AlterConfigOpType.SET),
            ConfigEntry("kafka.on.error", "reject", incremental_operation=AlterConfigOpType.SET),
        ],
    )
    (done,) = admin.incremental_alter_configs([changed]).values()
    done.result(30)

    after = _config(admin, "configured")
    assert before["retention.ms"] == "7200000"
    assert (after["retention.ms"], after["cleanup.policy"]) == ("3600000", "delete")
    assert after["kafka.on.error"] == "reject"
    with StreamhouseClient(service.endpoint) as streamhouse:
        properties = streamhouse.table_state("configured").table.descriptor.properties
    assert properties["kafka.on.error"] == "reject"

    wrong = ConfigResource(
        ResourceType.TOPIC,
        "configured",
        incremental_configs=[
            ConfigEntry("kafka.on.error", "maybe", incremental_operation=AlterConfigOpType.SET)
        ],
    )
    (refused,) = admin.incremental_alter_configs([wrong]).values()
    with pytest.raises(KafkaException, match=r"INVALID_CONFIG.*kafka\.on\.error"):
        refused.result(30)
    assert _config(admin, "configured") == after


def test_groups_are_listed_and_described(service: ServiceProcess, admin: AdminClient) -> None:
    brokers = service.kafka_address
    create_topic(brokers, "grouped", 2)
    Librdkafka(brokers).produce("grouped", _numbers(10))
    member = LibrdkafkaMember(brokers, "grouped", "described")
    found = 0
    while found < 10:
        found += len(member.poll())
    member.commit()

    (asked,) = admin.describe_consumer_groups(["described"]).values()
    described = asked.result(30)
    listed = {group.group_id for group in admin.list_consumer_groups().result(30).valid}
    member.close()
    (asked,) = admin.describe_consumer_groups(["described"]).values()
    left = asked.result(30)

    assert "described" in listed
    assert described.state is ConsumerGroupState.STABLE
    (one,) = described.members
    assert sorted(p.partition for p in one.assignment.topic_partitions) == [0, 1]
    assert (left.state, left.members) == (ConsumerGroupState.EMPTY, [])


def test_positions_of_an_empty_group_are_set_back(
    service: ServiceProcess, admin: AdminClient
) -> None:
    brokers = service.kafka_address
    create_topic(brokers, "replayed")
    client = Librdkafka(brokers)
    client.produce("replayed", _numbers(100))
    assert len(client.consume("replayed", 100, group="replayers")) == 100

    back = ConsumerGroupTopicPartitions("replayers", [TopicPartition("replayed", 0, 40)])
    (done,) = admin.alter_consumer_group_offsets([back]).values()
    done.result(30)
    asked = ConsumerGroupTopicPartitions("replayers", [TopicPartition("replayed", 0)])
    (told,) = admin.list_consumer_group_offsets([asked]).values()
    positions = [(p.partition, p.offset) for p in told.result(30).topic_partitions]
    found = client.consume("replayed", 60, group="replayers")
    (gone,) = admin.delete_consumer_groups(["replayers"]).values()
    gone.result(30)
    again = client.consume("replayed", 100, group="replayers")

    assert positions == [(0, 40)]
    assert [read.offset for read in found] == list(range(40, 100))
    assert [read.offset for read in again] == list(range(100))


def test_offsets_are_listed(service: ServiceProcess, admin: AdminClient) -> None:
    create_topic(service.kafka_address, "listed")
    Librdkafka(service.kafka_address).produce("listed", _numbers(30))
    place = TopicPartition("listed", 0)

    def listed(spec: OffsetSpec) -> int:
        (asked,) = admin.list_offsets({place: spec}).values()
        return int(asked.result(30).offset)

    assert listed(OffsetSpec.earliest()) == 0
    assert listed(OffsetSpec.latest()) == 30
    assert listed(OffsetSpec.for_timestamp(0)) == 0
    # Long after the last record.
    assert listed(OffsetSpec.for_timestamp(1 << 42)) in (-1, 30)


def test_who_dies_is_followed_without_a_gap(service: ServiceProcess) -> None:
    """A member is killed with records that it has not committed: another one takes its place."""
    brokers, topic = service.kafka_address, "inherited"
    create_topic(brokers, topic, 4)
    by_victim: dict[int, list[int]] = defaultdict(list)
    by_heir: dict[int, list[int]] = defaultdict(list)
    values: set[bytes] = set()
    heir = LibrdkafkaMember(brokers, topic, "mortals")
    victim = subprocess.Popen(
        [sys.executable, "-c", _MEMBER, brokers, topic], stdout=subprocess.PIPE, text=True
    )
    give_up = time.monotonic() + 120

    def watch() -> None:
        """Kill it with the 300th record that it prints; what it had printed is read to the end."""
        assert victim.stdout is not None
        for number, line in enumerate(victim.stdout):
            part, offset, value = line.split()
            by_victim[int(part)].append(int(offset))
            values.add(value.encode())
            if number == 300:
                victim.kill()

    def poll() -> None:
        assert time.monotonic() < give_up, len(values)
        for part, offset, value in heir.poll():
            by_heir[part].append(offset)
            values.add(value)
        heir.commit()

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        while len(heir.partitions) != 2:
            poll()
        Librdkafka(brokers).produce(topic, _numbers(2_000))
        while watching.is_alive():
            poll()
        Librdkafka(brokers).produce(topic, _numbers(4_000)[2_000:])
        while len(values) < 4_000:
            poll()
    finally:
        victim.kill()
        victim.wait()
        watching.join()
        assert victim.stdout is not None
        victim.stdout.close()
        heir.close()

    assert by_victim
    for part in range(4):
        # A member that is given a partition begins where the group stands, and skips nothing.
        assert by_victim[part] == list(range(len(by_victim[part])))
        end = len(by_victim[part])
        for offset in by_heir[part]:
            assert offset <= end
            end = max(end, offset + 1)
