"""`serve --kafka-port` as a process of its own: what it prints, and that it answers and stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.free_ports import free_port
from tests.support.kafka_world import KafkaClient
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

API_VERSIONS, METADATA, CREATE, COORDINATOR = 18, 3, 19, 10


async def test_kafka_clients_are_served_beside_http_and_topics_outlive_a_restart(
    tmp_path: Path,
) -> None:
    for start in range(2):
        with ServiceProcess(tmp_path, "--kafka-port", "0", "--kafka-partitions", "2") as service:
            client = await KafkaClient.connect(service.kafka_address)
            await client.call(API_VERSIONS, 3)
            if start == 0:
                topics = [{"name": "a-topic", "num_partitions": -1, "replication_factor": -1}]
                await client.call(CREATE, 7, topics=topics)
            # More answers at once than a socket takes.
            numbers = [client.send(METADATA, 12, topics=None) for _ in range(2_000)]
            for number in numbers:
                answer = await client.answer(METADATA, 12, number)
                assert [(t.name, len(t.partitions)) for t in answer.topics] == [("a-topic", 2)]
            host, port = service.kafka_address.rsplit(":", 1)
            assert [(b.host, b.port) for b in answer.brokers] == [(host, int(port))]

            assert service.terminate() == 0
            assert await client.is_closed()
            await client.close()


async def test_clients_are_told_the_address_that_is_advertised(tmp_path: Path) -> None:
    port = free_port()
    options = ("--kafka-port", str(port), "--kafka-advertise", "lake.example:19092")
    with ServiceProcess(tmp_path, *options, "--kafka-auto-create", "false") as service:
        assert service.kafka_address == "lake.example:19092"
        client = await KafkaClient.connect(f"127.0.0.1:{port}")

        answer = await client.call(METADATA, 12, topics=[{"name": "orders.created"}])
        coordinator = await client.call(COORDINATOR, 3, key="g")

        assert [(b.host, b.port) for b in answer.brokers] == [("lake.example", 19_092)]
        assert (coordinator.host, coordinator.port) == ("lake.example", 19_092)
        assert answer.topics[0].error_code.name == "unknown_topic_or_partition"
        await client.close()


async def test_each_of_several_shards_is_a_broker(tmp_path: Path) -> None:
    with ServiceProcess(
        tmp_path / "data",
        *("--shards", "2", "--journal", f"file://{tmp_path / 'journal'}"),
        *("--kafka-port", "0"),
    ) as service:
        addresses = service.kafka_address.split(",")
        assert len(addresses) == 2
        topics = [{"name": f"t{n}", "num_partitions": 1, "replication_factor": 1} for n in range(4)]
        first = await KafkaClient.connect(addresses[0])
        made = await first.call(CREATE, 7, topics=topics)
        assert {t.error_code.name for t in made.topics} == {"none"}

        for address in addresses:
            client = await KafkaClient.connect(address)
            answer = await client.call(METADATA, 12, topics=None)
            assert sorted(f"{b.host}:{b.port}" for b in answer.brokers) == sorted(addresses)
            assert {t.name for t in answer.topics} == {f"t{n}" for n in range(4)}
            assert len({p.leader_id for t in answer.topics for p in t.partitions}) == 2
            await client.close()
        await first.close()


async def test_a_standby_is_the_same_broker_once_it_has_taken_over(tmp_path: Path) -> None:
    common = ("--journal", f"file://{tmp_path / 'journal'}", "--lease-ms", "1500")
    kafka = ("--kafka-port", "0")
    with (
        ServiceProcess(tmp_path / "one", *common, *kafka) as owner,
        ServiceProcess(tmp_path / "two", *common, *kafka, "--standby") as standby,
    ):
        client = await KafkaClient.connect(owner.kafka_address)
        topics = [{"name": "a-topic", "num_partitions": 1, "replication_factor": 1}]
        await client.call(CREATE, 7, topics=topics)
        before = await client.call(METADATA, 12, topics=None)

        owner.kill()
        standby.wait_ready()

        assert await client.is_closed()
        await client.close()
        other = await KafkaClient.connect(standby.kafka_address)
        after = await other.call(METADATA, 12, topics=None)
        assert after.topics == before.topics
        assert [b.node_id for b in after.brokers] == [b.node_id for b in before.brokers]
        assert standby.kafka_address != owner.kafka_address
        await other.close()
