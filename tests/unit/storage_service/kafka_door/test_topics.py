"""Topics that Kafka clients make, drop and configure: tables, with the same rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from streamhouse.core.model.records.record_format import RAW_TOPIC
from tests.support.kafka_world import KafkaClient, KafkaWorld, kafka_world

METADATA, CREATE, DELETE, DESCRIBE, ALTER, PARTITIONS, INCREMENTAL = 3, 19, 20, 32, 33, 37, 44
CLUSTER, COORDINATOR = 60, 10
TOPIC = 2


def _new(name: str, partitions: int = 1, **configs: str) -> dict[str, Any]:
    return {
        "name": name,
        "num_partitions": partitions,
        "replication_factor": 1,
        "configs": [{"name": n.replace("_", "."), "value": v} for n, v in configs.items()],
    }


async def _create(client: KafkaClient, *topics: dict[str, Any], **more: Any) -> Any:
    answer = await client.call(CREATE, 7, topics=topics, **more)
    return answer.topics if len(topics) != 1 else answer.topics[0]


async def _described(world: KafkaWorld, path: str) -> dict[str, Any]:
    answer = await world.http.call("GET", f"/v1/tables/{path}")
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("version", range(2, 8))
async def test_a_topic_is_a_raw_table(tmp_path: Path, version: int) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()

        answer = await client.call(CREATE, version, topics=[_new("web-clicks", 3)])

        assert [t.error_code for t in answer.topics] == [ErrorCode.none]
        table = world.service.table("default.web_clicks")
        assert table.info.schema.to_arrow().equals(RAW_TOPIC)
        assert table.info.bucket_count == 3
        assert table.info.descriptor.properties == {
            "kafka.value.format": "raw",
            "kafka.on.schema": "replace",
            "kafka.topic": "web-clicks",
        }
        metadata = await client.call(METADATA, 12, topics=None)
        assert [(t.name, len(t.partitions)) for t in metadata.topics] == [("web-clicks", 3)]


async def test_what_is_wrong_with_a_new_topic_is_said_of_it_alone(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        await _create(client, _new("there"))

        found = await _create(
            client,
            _new("there"),
            _new("no topic"),
            _new("many", 100_000),
            {**_new("copies"), "replication_factor": 3},
            {**_new("none"), "replication_factor": 0},
            _new("odd", no_such="1"),
            _new("odd-policy", cleanup_policy="shrink"),
            _new("for-ever", table_datalake_enabled="false", retention_ms="-1"),
            _new("fine", -1, retention_ms="60000", segment_ms="1"),
            {**_new("placed"), "assignments": [{"partition_index": 0, "broker_ids": [0]}]},
            _new("t__rejected"),
        )

        assert {t.name: t.error_code.name for t in found} == {
            "there": "topic_already_exists",
            "no topic": "invalid_topic_exception",
            "many": "invalid_partitions",
            "copies": "none",
            "none": "invalid_replication_factor",
            "odd": "invalid_config",
            "odd-policy": "invalid_config",
            "for-ever": "invalid_config",
            "fine": "none",
            "placed": "invalid_request",
            "t__rejected": "invalid_topic_exception",
        }
        assert all(t.error_message for t in found if t.error_code is not ErrorCode.none)
        assert (await _described(world, "fine"))["properties"]["table.log.ttl"] == "60000ms"
        assert next(t for t in found if t.name == "copies").replication_factor == 1
        assert [str(path) for path in world.service.manager.list_tables(None)] == [
            "default.copies",
            "default.fine",
            "default.there",
        ]


async def test_a_topic_that_is_only_tried_is_not_made(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()

        found = await _create(client, _new("tried", 2), validate_only=True)

        assert (found.error_code, found.num_partitions) == (ErrorCode.none, 2)
        assert world.service.manager.list_tables(None) == []


async def test_what_is_only_tried_is_refused_as_if_it_were_meant(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        await _create(client, _new("there"))

        async def created(topic: dict[str, Any]) -> set[ErrorCode]:
            """What is answered for a new topic, tried and meant."""
            tried = await _create(client, topic, validate_only=True)
            return {tried.error_code, (await _create(client, topic)).error_code}

        async def altered(name: str, value: str) -> set[ErrorCode]:
            """What is answered for another setting of a topic, tried and meant."""
            config = {"name": name, "config_operation": 0, "value": value}
            resource = {"resource_type": TOPIC, "resource_name": "there", "configs": [config]}
            codes = set()
            for is_tried in (True, False):
                answer = await client.call(
                    INCREMENTAL, 1, resources=[resource], validate_only=is_tried
                )
                codes.add(ErrorCode(answer.responses[0].error_code))
            return codes

        assert await created(_new("there")) == {ErrorCode.topic_already_exists}
        assert await created(_new("many", 1_000_000_000)) == {ErrorCode.invalid_partitions}
        assert await altered("kafka.value.format", "bogus") == {ErrorCode.invalid_config}
        assert await altered("table.log.ttl", "never") == {ErrorCode.invalid_request}


@pytest.mark.parametrize("topic", ["web_clicks", "web.clicks.all"])
async def test_a_topic_is_not_made_under_the_name_of_another_one(
    tmp_path: Path, topic: str
) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        other = topic.replace("_", "-").replace(".", "-")

        for is_tried in (True, False):
            found = await _create(client, _new(topic, kafka_topic=other), validate_only=is_tried)
            assert found.error_code is ErrorCode.invalid_config
            assert f"'{other}'" in found.error_message
        assert (await _create(client, _new(topic, kafka_topic=topic))).error_code is ErrorCode.none


async def test_two_topics_that_would_be_one_table_are_not_both_made(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        await _create(client, _new("a.b.c"))

        other = await _create(client, _new("a-b-c"))
        asked = await client.call(
            METADATA, 12, topics=[{"name": "a-b-c"}], allow_auto_topic_creation=True
        )
        dropped = await client.call(DELETE, 6, topics=[{"name": "a-b-c"}])

        assert other.error_code is ErrorCode.topic_already_exists
        assert asked.topics[0].error_code is ErrorCode.invalid_topic_exception
        assert dropped.responses[0].error_code is ErrorCode.invalid_topic_exception
        assert "'a.b.c'" in dropped.responses[0].error_message


async def test_asking_for_a_topic_makes_it_where_that_is_wanted(tmp_path: Path) -> None:
    async with kafka_world(tmp_path, kafka_partitions=2) as world:
        client = await world.client()
        topics: Any = [{"name": "new"}]

        without = await client.call(METADATA, 9, topics=topics, allow_auto_topic_creation=False)
        made = await client.call(METADATA, 9, topics=topics, allow_auto_topic_creation=True)

        assert without.topics[0].error_code is ErrorCode.unknown_topic_or_partition
        assert (made.topics[0].error_code, len(made.topics[0].partitions)) == (ErrorCode.none, 2)


async def test_no_topic_is_made_by_asking_where_that_is_off(tmp_path: Path) -> None:
    async with kafka_world(tmp_path, kafka_auto_create=False) as world:
        client = await world.client()

        for version in (0, 12):
            asked = await client.call(METADATA, version, topics=[{"name": "new"}])
            assert asked.topics[0].error_code is ErrorCode.unknown_topic_or_partition
        broker = {"resource_type": 4, "resource_name": "0", "configuration_keys": None}
        described = await client.call(DESCRIBE, 4, resources=[broker])
        configs = {config.name: config.value for config in described.results[0].configs}
        assert configs["auto.create.topics.enable"] == "false"
        assert (await _create(client, _new("new"))).error_code is ErrorCode.none


async def test_topics_of_kafkas_own_are_not_made_by_asking(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()

        asked = await client.call(
            METADATA, 12, topics=[{"name": "__consumer_offsets"}], allow_auto_topic_creation=True
        )

        assert asked.topics[0].error_code is ErrorCode.unknown_topic_or_partition
        assert world.service.manager.list_tables(None) == []


@pytest.mark.parametrize("version", range(1, 7))
async def test_a_topic_is_dropped(tmp_path: Path, version: int) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        await _create(client, _new("x"))
        names = ["x", "none"]
        asked: Any = {"topics": [{"name": n} for n in names]}

        answer = await client.call(
            DELETE, version, **(asked if version >= 6 else {"topic_names": names})
        )

        assert [(t.name, t.error_code.name) for t in answer.responses] == [
            ("x", "none"),
            ("none", "unknown_topic_or_partition"),
        ]
        assert world.service.manager.list_tables(None) == []


async def test_partitions_are_not_added(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        await _create(client, _new("x"))

        answer = await client.call(PARTITIONS, 3, topics=[{"name": "x", "count": 5}])

        assert answer.results[0].error_code is ErrorCode.invalid_partitions
        assert "fixed" in answer.results[0].error_message


async def test_a_topic_is_configured(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        await _create(client, _new("x"))
        resource: Any = {"resource_type": TOPIC, "resource_name": "x"}

        async def configs() -> dict[str, str]:
            answer = await client.call(DESCRIBE, 4, resources=[resource])
            assert answer.results[0].error_code is ErrorCode.none, answer
            return {c.name: c.value for c in answer.results[0].configs}

        async def change(name: str, operation: int, value: str | None) -> Any:
            change = {"name": name, "config_operation": operation, "value": value}
            answer = await client.call(
                INCREMENTAL, 1, resources=[{**resource, "configs": [change]}]
            )
            return answer.responses[0]

        assert (await configs())["retention.ms"] == "-1"
        assert (await change("retention.ms", 0, "1000")).error_code is ErrorCode.none
        assert (await configs())["retention.ms"] == "1000"
        assert (await change("retention.ms", 1, None)).error_code is ErrorCode.none
        assert (await configs())["retention.ms"] == "-1"
        assert (await change("retention.ms", 0, "1000")).error_code is ErrorCode.none
        assert (await change("retention.ms", 0, "-1")).error_code is ErrorCode.none
        assert (await configs())["retention.ms"] == "-1"
        assert (await change("cleanup.policy", 0, "delete")).error_code is ErrorCode.none
        assert (await change("cleanup.policy", 0, "compact")).error_code is ErrorCode.invalid_config
        assert (await change("retention.ms", 2, "1")).error_code is ErrorCode.invalid_request
        assert (await change("nothing", 0, "1")).error_code is ErrorCode.invalid_config
        assert (await change("table.log.ttl", 0, "x")).error_code is ErrorCode.invalid_request
        altered = await client.call(
            ALTER, 2, resources=[{**resource, "configs": [{"name": "retention.ms", "value": "5"}]}]
        )
        assert altered.responses[0].error_code is ErrorCode.none
        assert (await configs())["retention.ms"] == "5"


@pytest.mark.parametrize("version", range(1, 5))
async def test_the_broker_says_how_it_is_configured(tmp_path: Path, version: int) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()

        answer = await client.call(
            DESCRIBE,
            version,
            resources=[
                {
                    "resource_type": 4,
                    "resource_name": "0",
                    "configuration_keys": ["num.partitions"],
                },
                {"resource_type": 4, "resource_name": "7"},
                {"resource_type": TOPIC, "resource_name": "none"},
            ],
        )

        assert [c.value for c in answer.results[0].configs] == ["1"]
        assert [r.error_code.name for r in answer.results] == [
            "none",
            "invalid_request",
            "unknown_topic_or_partition",
        ]


async def test_the_broker_coordinates_groups_and_no_transactions(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        port = world.door.address.port

        for version in range(4):
            group = await client.call(COORDINATOR, version, key="g")
            assert (group.error_code, group.port) == (ErrorCode.none, port)
        many = await client.call(COORDINATOR, 4, key_type=0, coordinator_keys=["g", ""])
        assert [c.error_code.name for c in many.coordinators] == ["none", "invalid_group_id"]
        assert many.coordinators[0].port == port
        transaction = await client.call(COORDINATOR, 4, key_type=1, coordinator_keys=["t"])
        assert "transactions" in transaction.coordinators[0].error_message
        cluster = await client.call(CLUSTER, 1)
        assert [(b.broker_id, b.port) for b in cluster.brokers] == [(0, port)]
        assert cluster.cluster_id == world.service.manager.service_id


async def test_what_is_named_many_times_is_answered_once(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await world.http.create_table("events", bucket_count=3)
        client = await world.client()

        metadata = await client.call(METADATA, 12, topics=[{"name": "events"}] * 2_000)
        resource = {"resource_type": TOPIC, "resource_name": "events", "configuration_keys": None}
        configs = await client.call(DESCRIBE, 4, resources=[resource] * 2_000)

        assert [(t.name, len(t.partitions)) for t in metadata.topics] == [("events", 3)]
        assert [r.resource_name for r in configs.results] == ["events"]
