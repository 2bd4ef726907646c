"""Requests of many elements: others have the event loop in between, and the work is bounded."""

from __future__ import annotations

import dataclasses
import logging
import types
from collections.abc import Callable, Coroutine, Generator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from streamhouse.storage_service.kafka_door._api import Api
from streamhouse.storage_service.kafka_door._apis import APIS
from streamhouse.storage_service.server.access._grants import token_hash
from tests.support.fetch_world import MemoryHistory, tiered_clicks
from tests.support.held_step import around, lower
from tests.support.in_process_service import event_rows
from tests.support.kafka_batches import produced, records
from tests.support.kafka_world import kafka_world

PRODUCE, LIST_OFFSETS, OFFSET_COMMIT, OFFSET_FETCH, DESCRIBE_GROUPS = 0, 2, 8, 9, 15
LEAVE_GROUP, DELETE_TOPICS, DESCRIBE_CONFIGS, ALTER_CONFIGS = 13, 20, 32, 44
SECOND = timedelta(seconds=1)
TOKEN = b"reader_0123456789"
COUNT, SOME = 600, 40
NAMES = [f"t{i}" for i in range(COUNT)]
PRODUCED = {"acks": -1, "timeout": SECOND}
FETCHED = {
    "replica_id": -1,
    "max_wait": timedelta(0),
    "isolation_level": 0,
    "min_bytes": 1,
    "max_bytes": 1 << 20,
}
COMMITTED = {"group_id": "g", "generation_id_or_member_epoch": -1, "member_id": ""}

# A request of `SOME` elements of each API that takes many: topics that nobody knows, and
# partitions of one that is known.
REQUESTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "produce topics": (
        *(PRODUCE, 9),
        {
            **PRODUCED,
            "topic_data": [{"name": n, "partition_data": [{"records": b""}]} for n in NAMES[:SOME]],
        },
    ),
    "fetch": (
        *(1, 11),
        {
            **FETCHED,
            "topics": [
                {
                    "topic": "clicks",
                    "partitions": [
                        {"partition": i, "fetch_offset": 30, "partition_max_bytes": 1}
                        for i in range(SOME)
                    ],
                }
            ],
        },
    ),
    "list offsets": (
        *(LIST_OFFSETS, 1),
        {
            "topics": [
                {"name": "clicks", "partitions": [{"partition_index": i} for i in range(SOME)]}
            ]
        },
    ),
    "leader epochs": (
        *(23, 3),
        {"topics": [{"topic": "clicks", "partitions": [{"partition": 0}] * SOME}]},
    ),
    "metadata": (3, 12, {"topics": [{"name": n} for n in NAMES[:SOME]]}),
    "find coordinator": (10, 4, {"coordinator_keys": NAMES[:SOME]}),
    "delete topics": (DELETE_TOPICS, 5, {"topic_names": NAMES[:SOME], "timeout": SECOND}),
    "create partitions": (
        *(37, 3),
        {"timeout": SECOND, "topics": [{"name": n, "assignments": None} for n in NAMES[:SOME]]},
    ),
    "describe configs": (
        *(DESCRIBE_CONFIGS, 4),
        {"resources": [{"resource_type": 2, "resource_name": n} for n in NAMES[:SOME]]},
    ),
    "alter configs": (
        *(33, 2),
        {"resources": [{"resource_type": 2, "resource_name": n} for n in NAMES[:SOME]]},
    ),
    "describe groups": (DESCRIBE_GROUPS, 5, {"groups": NAMES[:SOME]}),
    "delete groups": (42, 2, {"groups_names": NAMES[:SOME]}),
    "commit topics": (
        *(OFFSET_COMMIT, 8),
        {**COMMITTED, "topics": [{"name": n, "partitions": [{}]} for n in NAMES[:SOME]]},
    ),
    "commit partitions": (
        *(OFFSET_COMMIT, 8),
        {
            **COMMITTED,
            "topics": [
                {"name": "clicks", "partitions": [{"partition_index": i} for i in range(SOME)]}
            ],
        },
    ),
    "positions": (
        *(OFFSET_FETCH, 8),
        {"groups": [{"group_id": n, "topics": None} for n in NAMES[:SOME]]},
    ),
    "positions of partitions": (
        *(OFFSET_FETCH, 7),
        {"group_id": "g", "topics": [{"name": "clicks", "partition_indexes": range(SOME)}]},
    ),
    "delete positions": (
        *(47, 0),
        {"group_id": "g", "topics": [{"name": n, "partitions": [{}]} for n in NAMES[:SOME]]},
    ),
}


class _Turns:
    """Counts how often the answering of a request lets the event loop go on with others."""

    def __init__(self) -> None:
        self.count = 0

    def counted(self, api: Api) -> Api:
        """Return the API, counted."""

        async def answer(*given: Any) -> Any:
            answering: Any = api.answer(*given)
            return await self._run(answering)

        return dataclasses.replace(api, answer=answer)

    @types.coroutine
    def _run(self, answering: Coroutine[Any, Any, Any]) -> Generator[Any, None, Any]:
        while True:
            try:
                waits_for = answering.send(None)
            except StopIteration as stop:
                return stop.value
            # Whoever waits for something yields that; `sleep(0)` yields nothing.
            self.count += waits_for is None
            yield waits_for


async def test_every_long_request_lets_others_run_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower(monkeypatch, "loop-slice-s", -1.0)
    turns = _Turns()
    counted = {key: turns.counted(api) for key, api in APIS.items()}
    history = MemoryHistory()
    async with kafka_world(tmp_path, history=history, apis=counted) as world:
        await tiered_clicks(world, history)
        client = await world.client()

        for name, (key, version, values) in REQUESTS.items():
            turns.count = 0
            await client.call(key, version, **values)
            assert turns.count >= SOME, name


def _seen(monkeypatch: pytest.MonkeyPatch, step: str) -> list[Any]:
    """Note the arguments of each call of a step."""
    calls: list[Any] = []

    def noted(real: Callable[..., Any], *given: Any, **more: Any) -> Any:
        calls.append(given)
        return real(*given, **more)

    around(monkeypatch, step, noted)
    return calls


async def test_long_requests_and_answers_are_read_and_written_on_threads(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        run, on_threads = world.service.run_blocking, []

        async def noted(function: Any, *given: Any) -> Any:
            on_threads.append(function.__name__)
            return await run(function, *given)

        world.service.run_blocking = noted  # type: ignore[assignment]
        found = await client.call(10, 4, coordinator_keys=NAMES)
        few = await client.call(10, 4, coordinator_keys=NAMES[:400])

    assert [one.key for one in found.coordinators] == NAMES
    assert len(few.coordinators) == 400
    assert on_threads == ["_parsed_request", "answer_body"]


@pytest.mark.parametrize("version", [1, 5, 9])
async def test_a_partition_that_is_named_twice_is_refused_by_list_offsets(
    tmp_path: Path, version: int
) -> None:
    """As Kafka's broker does since version 1: INVALID_REQUEST, once."""
    history = MemoryHistory()
    async with kafka_world(tmp_path, history=history) as world:
        await tiered_clicks(world, history)
        client = await world.client()
        asked = [(0, 5), (1, -1), (0, -1), (0, 5)]

        answer = await client.call(
            *(LIST_OFFSETS, version),
            topics=[
                {"name": name, "partitions": [{"partition_index": p, "timestamp": at}]}
                for name in ("clicks", "nobody")
                for p, at in asked
            ],
        )

    unknown = ErrorCode.unknown_topic_or_partition
    assert {
        topic.name: [(p.partition_index, p.error_code) for p in topic.partitions]
        for topic in answer.topics
    } == {
        "clicks": [(0, ErrorCode.invalid_request), (1, unknown)],
        "nobody": [(0, unknown), (1, unknown)],
    }


async def test_a_partition_that_is_named_twice_is_refused_by_produce(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await tiered_clicks(world, MemoryHistory())
        client = await world.client()
        batch = produced(records([b"v"]))
        end = world.service.table("clicks").tablet(0).high_watermark
        twice = [{"index": 0, "records": batch}, {"index": 0, "records": batch}]

        answer = await client.call(
            PRODUCE, 9, **PRODUCED, topic_data=[{"name": "clicks", "partition_data": twice}]
        )

        parts = answer.responses[0].partition_responses
        assert [part.error_code for part in parts] == [ErrorCode.invalid_record] * 2
        assert "named twice" in (parts[0].error_message or "")
        assert world.service.table("clicks").tablet(0).high_watermark == end


async def test_a_topic_is_configured_once_in_a_request(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await tiered_clicks(world, MemoryHistory())
        client = await world.client()

        def change(value: str, count: int = 1) -> dict[str, Any]:
            settings = [{"name": "retention.ms", "value": value}] * count
            return {"resource_type": 2, "resource_name": "clicks", "configs": settings}

        twice = await client.call(ALTER_CONFIGS, 1, resources=[change("70000"), change("80000")])
        many = await client.call(ALTER_CONFIGS, 1, resources=[change("70000", 1_001)])

        for answer, why in ((twice, "named 2 times"), (many, "1001 settings")):
            assert [one.error_code for one in answer.responses] == [ErrorCode.invalid_request]
            assert why in answer.responses[0].error_message
        assert "table.log.ttl" not in world.service.table("clicks").info.descriptor.properties


async def test_a_table_is_looked_at_once_for_all_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with kafka_world(tmp_path) as world:
        await world.http.create_table("events", event_rows(0, 1).schema)
        await world.http.create_table("others", event_rows(0, 1).schema)
        client = await world.client()
        for group in ("g1", "g2"):
            topics = [{"name": "events", "partitions": [{"committed_offset": 0}]}]
            await client.call(OFFSET_COMMIT, 8, **{**COMMITTED, "group_id": group}, topics=topics)
        groups = ["g1", *NAMES[:30], "g2"]
        looks = _seen(monkeypatch, "consumers-asked")

        fetched = await client.call(
            OFFSET_FETCH, 8, groups=[{"group_id": one, "topics": None} for one in groups]
        )
        described = await client.call(DESCRIBE_GROUPS, 5, groups=groups)

        assert len(looks) == 2 * 2
        assert [(one.group_id, [t.name for t in one.topics]) for one in fetched.groups] == [
            (one, ["events"] if one in ("g1", "g2") else []) for one in groups
        ]
        assert [one.group_state for one in described.groups] == [
            "Empty" if one in ("g1", "g2") else "Dead" for one in groups
        ]


async def test_names_like_an_unknown_topic_are_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        looks = _seen(monkeypatch, "unknown-table-named")

        answer = await client.call(DELETE_TOPICS, 5, topic_names=["clicks"], timeout=SECOND)

        assert answer.responses[0].error_message == (
            "topic 'clicks': table 'default.clicks' does not exist"
        )
        assert looks == []


async def test_thousands_of_refused_topics_are_few_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grants = tmp_path / "grants"
    grants.write_text(
        f'[[token]]\nname = "r"\nsha256 = "{token_hash(TOKEN)}"\ngrants = ["read:default.x"]\n'
    )
    grants.chmod(0o600)
    async with kafka_world(tmp_path / "data", grants_file=grants) as world:
        client = await world.client()
        await client.call(17, 1, mechanism="PLAIN")
        await client.call(36, 2, auth_bytes=b"\0me\0" + TOKEN)

        with caplog.at_level(logging.INFO):
            answer = await client.call(DELETE_TOPICS, 5, topic_names=NAMES, timeout=SECOND)

        errors = {one.error_code for one in answer.responses}
        assert errors == {ErrorCode.topic_authorization_failed}
        lines = [record.getMessage() for record in caplog.records]
        assert sum("event=refused code=forbidden" in line for line in lines) == 100
        left = [line for line in lines if "event=errors_not_logged" in line]
        assert len(left) == 1
        assert f"code=forbidden count={COUNT} logged=100" in left[0]


async def test_members_leave_in_one_request_however_many(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()

        answer = await client.call(
            LEAVE_GROUP,
            4,
            group_id="g",
            members=[{"member_id": n, "group_instance_id": None} for n in NAMES],
        )

        assert [one.member_id for one in answer.members] == NAMES
        assert {one.error_code for one in answer.members} == {ErrorCode.unknown_member_id}
