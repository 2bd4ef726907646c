"""OffsetCommit, OffsetFetch and OffsetDelete, on the positions of `_positions.py`.

A position's metadata is not kept: the answer has "" instead.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from streamhouse.core.errors import StreamhouseError
from streamhouse.storage_service.kafka.groups.coordinator import GroupKey
from streamhouse.storage_service.kafka.groups.messages import NO_GENERATION, Identity
from streamhouse.storage_service.kafka_door._exchange import KafkaExchange
from streamhouse.storage_service.kafka_door.broker._group_desk import (
    GroupDesk,
    code_for_members,
    retriable_by_members,
)
from streamhouse.storage_service.kafka_door.groups._positions import (
    Position,
    TablePositions,
    all_positions,
    commit_positions,
    forget_positions,
    positions,
    refusal,
    settle_commits,
)
from streamhouse.storage_service.kafka_door.topics._table_identity import NO_EPOCH
from streamhouse.storage_service.server.status.event_loop import in_slices

__all__ = [
    "answer_offset_commit",
    "answer_offset_delete",
    "answer_offset_fetch",
    "refuse_offset_commit",
    "refuse_offset_fetch",
]

NO_POSITION: Final = -1
_MANY_GROUPS_VERSION: Final = 8
"""The first version in which OffsetFetch names several groups."""
_COMMITTED_AT_ONCE: Final = 16


# -- OffsetCommit --------------------------------------------------------------------------------


async def answer_offset_commit(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Commit positions for a member of the current generation, or without a group membership."""
    desk, group_id = exchange.broker.groups, request.group_id
    key = desk.key(exchange, group_id)
    identity = Identity(
        member_id=request.member_id, instance_id=getattr(request, "group_instance_id", None)
    )
    generation = request.generation_id_or_member_epoch
    error = await desk.refusal(group_id)
    async with desk.in_order(key):
        if error is None:
            error = desk.coordinator.check_commit(key, identity, generation)
        if error is not ErrorCode.none:
            exchange.note(retriable_by_members(error))
            return refuse_offset_commit(request, error, "")
        # Each topic once, even if the request names a topic twice; the last offset counts.
        topics: dict[str, dict[int, Position]] = {}
        mentions = (
            (topic.name, partition) for topic in request.topics for partition in topic.partitions
        )
        async for name, partition in in_slices(mentions):
            epoch = getattr(partition, "committed_leader_epoch", NO_EPOCH)
            position = Position(offset=partition.committed_offset, leader_epoch=epoch)
            topics.setdefault(name, {})[partition.partition_index] = position
        codes: dict[str, Mapping[int, ErrorCode]] = {}
        remaining_topics = iter(topics.items())
        while topic_slice := list(itertools.islice(remaining_topics, _COMMITTED_AT_ONCE)):
            answers = (commit_positions(exchange, group_id, *topic) for topic in topic_slice)
            topic_codes = await asyncio.gather(*answers)
            codes |= {
                topic[0]: answer for topic, answer in zip(topic_slice, topic_codes, strict=True)
            }
        if generation > NO_GENERATION:
            codes = _fence_members(desk, key, identity, topics, codes)
    topic_answers = []
    async for topic in in_slices(request.topics):
        partition_answers = []
        async for partition in in_slices(topic.partitions):
            code = codes[topic.name][partition.partition_index]
            exchange.note(code)
            partition_answers.append(
                {"partition_index": partition.partition_index, "error_code": code}
            )
        topic_answers.append({"name": topic.name, "partitions": partition_answers})
    return {"topics": topic_answers}


def _fence_members(
    desk: GroupDesk,
    key: GroupKey,
    identity: Identity,
    topics: Mapping[str, Mapping[int, Position]],
    codes: Mapping[str, Mapping[int, ErrorCode]],
) -> dict[str, Mapping[int, ErrorCode]]:
    """Remove a member after a commit to a dropped table without a leader epoch.

    The member does not notice the new table without help. The member joins again, and fetches the
    group's positions in the new table.
    """
    fenced = {
        name: {
            number: ErrorCode.unknown_member_id
            for number, code in of_topic.items()
            if code is ErrorCode.fenced_leader_epoch and topics[name][number].leader_epoch <= 0
        }
        for name, of_topic in codes.items()
    }
    if any(fenced.values()):
        desk.coordinator.leave(key, [identity])
        desk.look()
    return {name: {**of_topic, **fenced[name]} for name, of_topic in codes.items()}


def refuse_offset_commit(request: Any, code: ErrorCode, _: str) -> Mapping[str, Any]:
    """Return an answer with the code for every partition."""
    code = retriable_by_members(code)
    return _by_topic(
        (topic.name, [(partition.partition_index, code) for partition in topic.partitions])
        for topic in request.topics
    )


def _by_topic(topics: Iterable[tuple[str, list[tuple[int, ErrorCode]]]]) -> Mapping[str, Any]:
    return {
        "topics": [
            {
                "name": name,
                "partitions": [
                    {"partition_index": number, "error_code": code} for number, code in partitions
                ],
            }
            for name, partitions in topics
        ]
    }


# -- OffsetFetch ---------------------------------------------------------------------------------


async def answer_offset_fetch(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Answer with the positions of groups; a partition without a position is at -1."""
    is_batched = exchange.api_version >= _MANY_GROUPS_VERSION
    group_queries = request.groups if is_batched else (request,)
    # A repeated question is answered once: few bytes request all positions of a group.
    queries = {(query.group_id, query.topics): query for query in group_queries}
    all_topics = await _all_topics(
        exchange, [group_id for group_id, topics in queries if topics is None]
    )
    groups = []
    async for group_query in in_slices(queries.values()):
        answer = await _group_answer(exchange, group_query, all_topics)
        if not is_batched:
            return answer
        groups.append({"group_id": group_query.group_id, **answer})
    return {"groups": groups}


async def _all_topics(
    exchange: KafkaExchange, group_ids: Iterable[str]
) -> Mapping[str, Mapping[str, TablePositions]] | ErrorCode:
    """Return all positions of these groups, or a code if the positions are unavailable."""
    usable = [
        group_id
        async for group_id in in_slices(group_ids)
        if await refusal(exchange, group_id) is None
    ]
    try:
        # Commits that are in progress count.
        await settle_commits(exchange, usable)
        return await all_positions(exchange, usable)
    except StreamhouseError as failure:
        exchange.report(failure)
        return _fetched_later(code_for_members(failure))


async def _group_answer(
    exchange: KafkaExchange,
    query: Any,
    all_topics: Mapping[str, Mapping[str, TablePositions]] | ErrorCode,
) -> Mapping[str, Any]:
    desk, group_id = exchange.broker.groups, query.group_id
    error = await refusal(exchange, group_id)
    if error is None and query.topics is None:
        if not isinstance(all_topics, ErrorCode):
            # The group's shard may have changed meanwhile.
            standings = sorted(all_topics.get(group_id, {}).items())
            return {"topics": [await _topic(name, at, at.offsets) for name, at in standings]}
        error = all_topics
    if error is None:
        try:
            async with desk.in_order(desk.key(exchange, group_id)):
                topics = [
                    await _topic(
                        topic.name,
                        await positions(exchange, group_id, topic.name),
                        topic.partition_indexes,
                    )
                    async for topic in in_slices(query.topics)
                ]
            return {"topics": topics}
        except StreamhouseError as failure:
            exchange.report(failure)
            error = _fetched_later(code_for_members(failure))
    exchange.note(error)
    return _refused_group(query.topics, error)


def _fetched_later(code: ErrorCode) -> ErrorCode:
    """Return the code after which every client asks the same coordinator for positions again.

    librdkafka 2.16 asks once: after `not_coordinator` its consumer looks up the coordinator, but
    keeps an assignment without positions, and reads nothing until the next rebalance.
    """
    return ErrorCode.coordinator_load_in_progress if code is ErrorCode.not_coordinator else code


async def _topic(
    name: str, result: TablePositions | ErrorCode, partitions: Iterable[int]
) -> Mapping[str, Any]:
    code, table_positions = ErrorCode.none, TablePositions()
    if isinstance(result, TablePositions):
        table_positions = result
    else:
        code = result
    numbers = in_slices(partitions)
    return {
        "name": name,
        "partitions": [_partition(number, table_positions, code) async for number in numbers],
    }


def _partition(number: int, table_positions: TablePositions, code: ErrorCode) -> Mapping[str, Any]:
    has_position = number in table_positions.offsets
    return {
        "partition_index": number,
        "committed_offset": table_positions.offsets[number] if has_position else NO_POSITION,
        "committed_leader_epoch": table_positions.leader_epoch if has_position else NO_EPOCH,
        "metadata": "",
        "error_code": code,
    }


def _refused_group(asked_topics: Iterable[Any] | None, code: ErrorCode) -> Mapping[str, Any]:
    # Version 1 has error codes in partitions only.
    topics = [
        {
            "name": topic.name,
            "partitions": [
                _partition(number, TablePositions(), code) for number in topic.partition_indexes
            ],
        }
        for topic in asked_topics or ()
    ]
    return {"error_code": code, "topics": topics}


def refuse_offset_fetch(request: Any, code: ErrorCode, _: str) -> Mapping[str, Any]:
    """Return an answer with the code for every group."""
    code = _fetched_later(retriable_by_members(code))
    groups = getattr(request, "groups", None)
    if groups is None:
        return _refused_group(request.topics, code)
    return {
        "groups": [
            {"group_id": group.group_id, **_refused_group(group.topics, code)} for group in groups
        ]
    }


# -- OffsetDelete --------------------------------------------------------------------------------


async def answer_offset_delete(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Delete positions of topics without readers in the group.

    A group with members is refused, because the members' topics are in metadata that only clients
    understand.
    """
    desk, group_id = exchange.broker.groups, request.group_id
    key = desk.key(exchange, group_id)
    error = await desk.refusal(group_id)
    if error is None and desk.coordinator.group(key) is not None:
        error = ErrorCode.non_empty_group
    if error is not None:
        exchange.note(error)
        return {"error_code": error}
    partitions: dict[str, list[int]] = {}
    mentions = (
        (topic.name, partition) for topic in request.topics for partition in topic.partitions
    )
    async for name, partition in in_slices(mentions):
        partitions.setdefault(name, []).append(partition.partition_index)
    topics: list[tuple[str, list[tuple[int, ErrorCode]]]] = []
    async with desk.in_order(key):
        async for name, numbers in in_slices(partitions.items()):
            code = ErrorCode.none
            try:
                await forget_positions(exchange, group_id, name, numbers)
            except StreamhouseError as failure:
                exchange.report(failure)
                code = code_for_members(failure)
                exchange.note(code)
            topics.append((name, [(number, code) for number in numbers]))
    return _by_topic(topics)
