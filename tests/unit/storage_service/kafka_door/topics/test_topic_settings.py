"""Settings of topics: what is taken, what it does, and what is said to be so."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from streamhouse.core.model.records.record_format import RAW_TOPIC
from tests.support.fetch_world import fetch, fetched
from tests.support.kafka_batches import produced, records
from tests.support.kafka_world import KafkaClient, kafka_world

PRODUCE, COMMIT, CREATE, DESCRIBE, INCREMENTAL = 0, 8, 19, 32, 44
TOPIC, BROKER = 2, 4
# `org.apache.kafka.common.config.TopicConfig` of Kafka 4.1, and what 3.9 had beside it.
KNOWN_TO_KAFKA = {
    "cleanup.policy": "delete",
    "compression.gzip.level": "6",
    "compression.lz4.level": "9",
    "compression.type": "zstd",
    "compression.zstd.level": "3",
    "delete.retention.ms": "1",
    "file.delete.delay.ms": "1",
    "flush.messages": "1",
    "flush.ms": "1",
    "follower.replication.throttled.replicas": "*",
    "index.interval.bytes": "1",
    "leader.replication.throttled.replicas": "*",
    "local.retention.bytes": "1",
    "local.retention.ms": "1",
    "max.compaction.lag.ms": "1",
    "max.message.bytes": "1",
    "message.downconversion.enable": "true",
    "message.format.version": "3.0",
    "message.timestamp.after.max.ms": "1",
    "message.timestamp.before.max.ms": "1",
    "message.timestamp.difference.max.ms": "1",
    "message.timestamp.type": "LogAppendTime",
    "min.cleanable.dirty.ratio": "0.1",
    "min.compaction.lag.ms": "1",
    "min.insync.replicas": "2",
    "preallocate": "true",
    "remote.log.copy.disable": "true",
    "remote.log.delete.on.disable": "true",
    "remote.storage.enable": "true",
    "retention.bytes": "1",
    "retention.ms": "1000",
    "segment.bytes": "1",
    "segment.index.bytes": "1",
    "segment.jitter.ms": "1",
    "segment.ms": "1",
    "unclean.leader.election.enable": "true",
}


async def _created(client: KafkaClient, name: str, configs: dict[str, str]) -> Any:
    new = {
        "name": name,
        "num_partitions": 1,
        "replication_factor": 3,
        "configs": [{"name": key, "value": value} for key, value in configs.items()],
    }
    return (await client.call(CREATE, 7, topics=[new])).topics[0]


async def _described(client: KafkaClient, name: str, kind: int = TOPIC) -> dict[str, str]:
    resource = {"resource_type": kind, "resource_name": name}
    answer = await client.call(DESCRIBE, 4, resources=[resource])
    assert answer.results[0].error_code is ErrorCode.none, answer
    return {config.name: config.value for config in answer.results[0].configs}


async def _set(client: KafkaClient, topic: str, name: str, value: str) -> ErrorCode:
    config = {"name": name, "config_operation": 0, "value": value}
    resource = {"resource_type": TOPIC, "resource_name": topic, "configs": [config]}
    answer = await client.call(INCREMENTAL, 1, resources=[resource])
    code: ErrorCode = answer.responses[0].error_code
    return code


async def _produced(
    client: KafkaClient, topic: str, *pairs: tuple[bytes | None, bytes | None]
) -> ErrorCode:
    batch = produced(records([value for _, value in pairs], keys=[key for key, _ in pairs]))
    answer = await client.call(
        PRODUCE,
        9,
        acks=-1,
        timeout=timedelta(seconds=10),
        topic_data=[{"name": topic, "partition_data": [{"index": 0, "records": batch}]}],
    )
    code: ErrorCode = answer.responses[0].partition_responses[0].error_code
    return code


async def _told(
    client: KafkaClient, topic: str, pair: tuple[bytes | None, bytes | None], *, partition: int = 0
) -> tuple[ErrorCode, int]:
    """Produce one record; return the error and the offset that the producer is told."""
    batch = produced(records([pair[1]], keys=[pair[0]]))
    answer = await client.call(
        PRODUCE,
        9,
        acks=-1,
        timeout=timedelta(seconds=10),
        topic_data=[{"name": topic, "partition_data": [{"index": partition, "records": batch}]}],
    )
    (found,) = answer.responses[0].partition_responses
    return ErrorCode(found.error_code), found.base_offset


async def test_every_setting_that_kafka_knows_is_taken_and_described(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()

        made = await _created(client, "x", KNOWN_TO_KAFKA)

        assert (made.error_code, made.error_message) == (ErrorCode.none, None)
        described = await _described(client, "x")
        assert KNOWN_TO_KAFKA.keys() <= described.keys()
        assert described["retention.ms"] == "1000"
        for name, value in KNOWN_TO_KAFKA.items():
            assert await _set(client, "x", name, value) is ErrorCode.none, name


@pytest.mark.parametrize(
    ("configs", "shown", "ttl"),
    [
        ({}, "-1", None),
        ({"retention.ms": "-1"}, "-1", None),
        ({"retention.ms": "5"}, "5", "5ms"),
        ({"table.datalake.ttl": "2d"}, "172800000", None),
        ({"table.datalake.enabled": "false"}, "604800000", None),
    ],
)
async def test_retention_is_described_as_it_is_in_force(
    tmp_path: Path, configs: dict[str, str], shown: str, ttl: str | None
) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()

        assert (await _created(client, "x", configs)).error_code is ErrorCode.none

        assert (await _described(client, "x"))["retention.ms"] == shown
        properties = world.service.table("x").info.descriptor.properties
        assert properties.get("table.log.ttl") == ttl


async def test_what_is_not_kept_in_the_lake_is_not_kept_for_ever(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        off = {"table.datalake.enabled": "false"}
        assert (await _created(client, "x", off)).error_code is ErrorCode.none

        assert await _set(client, "x", "retention.ms", "-1") is ErrorCode.invalid_config
        for policy in ("compact", "compact,delete"):
            made = await _created(client, "y", {**off, "cleanup.policy": policy})
            assert made.error_code is ErrorCode.invalid_config
            assert "table.datalake.enabled = true" in made.error_message


async def test_largest_messages_are_those_that_are_taken(tmp_path: Path) -> None:
    async with kafka_world(tmp_path, batch_bytes_max=1 << 20) as world:
        client = await world.client()
        await _created(client, "x", {})

        assert (await _described(client, "x"))["max.message.bytes"] == "1048576"
        assert (await _described(client, "0", BROKER))["message.max.bytes"] == "1048576"


async def test_times_are_those_of_records_where_a_column_has_them(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await world.http.create_table("events")
        await world.http.create_table("clicks", RAW_TOPIC)
        client = await world.client()

        found = [await _described(client, name) for name in ("clicks", "events")]

        assert [one["message.timestamp.type"] for one in found] == ["CreateTime", "LogAppendTime"]


@pytest.mark.parametrize("policy", ["compact", "compact,delete", "delete,compact"])
async def test_a_compacted_topic_keeps_the_latest_value_of_each_key(
    tmp_path: Path, policy: str
) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()

        made = await _created(client, "connect-configs", {"cleanup.policy": policy})

        assert (made.error_code, made.error_message) == (ErrorCode.none, None)
        info = world.service.table("connect_configs").info
        assert info.descriptor.primary_key == ("key",)
        assert info.descriptor.properties == {
            "kafka.topic": "connect-configs",
            "kafka.value.format": "raw",
            "table.datalake.changelog": "true",
        }
        # Connect looks before it uses the topic.
        assert (await _described(client, "connect-configs"))["cleanup.policy"] == "compact"
        topic = "connect-configs"
        assert await _produced(client, topic, (b"a", b"x"), (None, b"x")) is (
            ErrorCode.invalid_record
        )
        assert await _produced(client, topic, (b"a", b"1"), (b"b", b"2")) is ErrorCode.none
        assert await _produced(client, topic, (b"a", b"3"), (b"b", None)) is ErrorCode.none
        latest = dict[bytes | None, bytes | None]()
        found = fetched(await fetch(client, {topic: {0: 0}}))[topic, 0]
        assert isinstance(found, list)
        for record in found:
            latest[record.key] = record.value
        assert latest == {b"a": b"3", b"b": None}


async def test_rows_of_a_compacted_topic_are_deleted_when_it_says_so(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        configs = {"cleanup.policy": "compact,delete", "retention.ms": "86400000"}

        assert (await _created(client, "windows", configs)).error_code is ErrorCode.none

        properties = world.service.table("windows").info.descriptor.properties
        assert properties["table.log.ttl"] == properties["table.datalake.ttl"] == "86400000ms"
        described = await _described(client, "windows")
        assert described["cleanup.policy"] == "compact,delete"
        assert described["retention.ms"] == "86400000"


async def test_a_record_of_a_compacted_topic_stays_in_its_partition(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        configs = [{"name": "cleanup.policy", "value": "compact"}]
        name = "a-s-changelog"
        new = [{"name": name, "num_partitions": 4, "replication_factor": 1, "configs": configs}]
        assert (await client.call(CREATE, 7, topics=new)).topics[0].error_code is ErrorCode.none
        described = await _described(client, name)
        assert (described["cleanup.policy"], described["retention.ms"]) == ("compact", "-1")
        assert await _set(client, name, "cleanup.policy", "compact") is ErrorCode.none
        assert await _set(client, name, "cleanup.policy", "delete") is ErrorCode.invalid_config

        for partition in range(4):
            told = [
                await _told(client, name, (b"k", value), partition=partition)
                for value in (b"1", None, b"3")
            ]
            assert told == [(ErrorCode.none, offset) for offset in range(3)]
        refused = await _told(client, name, (None, b"1"), partition=0)
        assert refused == (ErrorCode.invalid_record, -1)

        found = fetched(await fetch(client, {name: dict.fromkeys(range(4), 0)}))
        assert [[r.value for r in one] for one in found.values() if isinstance(one, list)] == [
            [b"1", None, b"3"]
        ] * 4


async def test_producers_to_a_compacted_topic_are_told_offsets_that_never_go_back(
    tmp_path: Path,
) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        await _created(client, "kept", {"cleanup.policy": "compact"})
        told = [
            await _told(client, "kept", (key, value))
            for key, value in [
                (b"a", b"1"),
                (b"b", b"1"),
                (b"a", b"2"),
                # Nothing changes.
                (b"c", None),
                (b"a", b"2"),
                (b"b", None),
                (b"d", b"1"),
            ]
        ]
        ends = [offset for _, offset in told]
        assert ends == sorted(ends)
        assert ends[0] == 0
        assert ends[-1] == world.service.table("kept").tablet(0).high_watermark - 1
        found = fetched(await fetch(client, {"kept": {0: ends[2] + 1}}))["kept", 0]
        assert isinstance(found, list)
        assert [(r.key, r.value) for r in found][-2:] == [(b"b", None), (b"d", b"1")]


async def test_a_topic_does_not_change_whether_it_is_compacted(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        await _created(client, "kept", {"cleanup.policy": "compact"})
        await _created(client, "all", {})

        assert await _set(client, "kept", "cleanup.policy", "compact") is ErrorCode.none
        assert await _set(client, "kept", "cleanup.policy", "delete") is ErrorCode.invalid_config
        assert await _set(client, "all", "cleanup.policy", "delete") is ErrorCode.none
        assert await _set(client, "all", "cleanup.policy", "compact") is ErrorCode.invalid_config


async def test_a_commit_that_is_refused_is_counted_as_what_it_is(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await world.http.create_table("events")
        client = await world.client()
        partitions = [{"partition_index": 0, "committed_offset": 0}]

        answer = await client.call(
            COMMIT,
            7,
            group_id="",
            generation_id_or_member_epoch=-1,
            topics=[{"name": "events", "partitions": partitions}],
        )

        code = answer.topics[0].partitions[0].error_code
        assert code is not ErrorCode.none
        counter = world.door._counts._requests
        assert counter.labels("offset_commit", code.name)._value.get() == 1
