"""OffsetCommit, OffsetFetch and OffsetDelete: where consumer groups are, as `positions.py` has it.

Metadata that a client gives with a position is not kept: "" is answered for it.
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
    Standing,
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
_BATCHED: Final = 8
"""From this version on OffsetFetch asks about several groups at once."""
_COMMITTED_AT_ONCE: Final = 16


# -- OffsetCommit --------------------------------------------------------------------------------


async def answer_offset_commit(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Commit positions for a member of the current generation, or for who is in no group."""
    desk, group_id = exchange.broker.groups, request.group_id
    key = desk.key(exchange, group_id)
    who = Identity(
        member_id=request.member_id, instance_id=getattr(request, "group_instance_id", None)
    )
    generation = request.generation_id_or_member_epoch
    error = await desk.refusal(group_id)
    async with desk.in_order(key):
        if error is None:
            error = desk.coordinator.check_commit(key, who, generation)
        if error is not ErrorCode.none:
            exchange.note(retriable_by_members(error))
            return refuse_offset_commit(request, error, "")
        # Each topic once, though a request may name it twice; the last offset counts.
        topics: dict[str, dict[int, Position]] = {}
        mentions = ((topic.name, one) for topic in request.topics for one in topic.partitions)
        async for name, one in in_slices(mentions):
            epoch = getattr(one, "committed_leader_epoch", NO_EPOCH)
            position = Position(offset=one.committed_offset, leader_epoch=epoch)
            topics.setdefault(name, {})[one.partition_index] = position
        codes: dict[str, Mapping[int, ErrorCode]] = {}
        left = iter(topics.items())
        while some := list(itertools.islice(left, _COMMITTED_AT_ONCE)):
            answers = (commit_positions(exchange, group_id, *topic) for topic in some)
            found = await asyncio.gather(*answers)
            codes |= {topic[0]: answer for topic, answer in zip(some, found, strict=True)}
        if generation > NO_GENERATION:
            codes = _lost(desk, key, who, topics, codes)
    answered = []
    async for topic in in_slices(request.topics):
        of_topic = []
        async for one in in_slices(topic.partitions):
            code = codes[topic.name][one.partition_index]
            exchange.note(code)
            of_topic.append({"partition_index": one.partition_index, "error_code": code})
        answered.append({"name": topic.name, "partitions": of_topic})
    return {"topics": answered}


def _lost(
    desk: GroupDesk,
    key: GroupKey,
    who: Identity,
    topics: Mapping[str, Mapping[int, Position]],
    codes: Mapping[str, Mapping[int, ErrorCode]],
) -> dict[str, Mapping[int, ErrorCode]]:
    """Put a member out that is in a table that is no more and tells no leader epoch.

    It does not notice by itself. It joins again, and asks where its group is in the new table.
    """
    lost = {
        name: {
            number: ErrorCode.unknown_member_id
            for number, code in of_topic.items()
            if code is ErrorCode.fenced_leader_epoch and topics[name][number].leader_epoch <= 0
        }
        for name, of_topic in codes.items()
    }
    if any(lost.values()):
        desk.coordinator.leave(key, [who])
        desk.look()
    return {name: {**of_topic, **lost[name]} for name, of_topic in codes.items()}


def refuse_offset_commit(request: Any, code: ErrorCode, _: str) -> Mapping[str, Any]:
    """Return the answer with one code for every partition."""
    code = retriable_by_members(code)
    return _by_topic(
        (topic.name, [(one.partition_index, code) for one in topic.partitions])
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
    """Answer where groups are; a partition without a position is at -1."""
    is_batched = exchange.api_version >= _BATCHED
    asked = request.groups if is_batched else (request,)
    # What is asked twice is answered once: all positions of a group are asked for by few bytes.
    asked_once = {(one.group_id, one.topics): one for one in asked}
    everywhere = await _everywhere(
        exchange, [group_id for group_id, topics in asked_once if topics is None]
    )
    groups = []
    async for one in in_slices(asked_once.values()):
        answer = await _group_answer(exchange, one, everywhere)
        if not is_batched:
            return answer
        groups.append({"group_id": one.group_id, **answer})
    return {"groups": groups}


async def _everywhere(
    exchange: KafkaExchange, group_ids: Iterable[str]
) -> Mapping[str, Mapping[str, Standing]] | ErrorCode:
    """Return all positions of the groups that are looked up here, or why nobody knows them."""
    usable = [one async for one in in_slices(group_ids) if await refusal(exchange, one) is None]
    try:
        # A commit that is on its way counts.
        await settle_commits(exchange, usable)
        return await all_positions(exchange, usable)
    except StreamhouseError as failure:
        exchange.report(failure)
        return code_for_members(failure)


async def _group_answer(
    exchange: KafkaExchange,
    asked: Any,
    everywhere: Mapping[str, Mapping[str, Standing]] | ErrorCode,
) -> Mapping[str, Any]:
    desk, group_id = exchange.broker.groups, asked.group_id
    error = await refusal(exchange, group_id)
    if error is None and asked.topics is None:
        if not isinstance(everywhere, ErrorCode):
            # Which shard it is at may have changed meanwhile.
            found = sorted(everywhere.get(group_id, {}).items())
            return {"topics": [await _topic(name, at, at.offsets) for name, at in found]}
        error = everywhere
    if error is None:
        try:
            async with desk.in_order(desk.key(exchange, group_id)):
                topics = [
                    await _topic(
                        topic.name,
                        await positions(exchange, group_id, topic.name),
                        topic.partition_indexes,
                    )
                    async for topic in in_slices(asked.topics)
                ]
            return {"topics": topics}
        except StreamhouseError as failure:
            exchange.report(failure)
            error = code_for_members(failure)
    exchange.note(error)
    return _refused_group(asked.topics, error)


async def _topic(name: str, found: Standing | ErrorCode, asked: Iterable[int]) -> Mapping[str, Any]:
    code, known = (ErrorCode.none, found) if isinstance(found, Standing) else (found, Standing())
    numbers = in_slices(asked)
    return {
        "name": name,
        "partitions": [_partition(number, known, code) async for number in numbers],
    }


def _partition(number: int, known: Standing, code: ErrorCode) -> Mapping[str, Any]:
    has_position = number in known.offsets
    return {
        "partition_index": number,
        "committed_offset": known.offsets[number] if has_position else NO_POSITION,
        "committed_leader_epoch": known.leader_epoch if has_position else NO_EPOCH,
        "metadata": "",
        "error_code": code,
    }


def _refused_group(asked: Iterable[Any] | None, code: ErrorCode) -> Mapping[str, Any]:
    # Version 1 has no place for the error but the partitions.
    topics = [
        {
            "name": topic.name,
            "partitions": [_partition(one, Standing(), code) for one in topic.partition_indexes],
        }
        for topic in asked or ()
    ]
    return {"error_code": code, "topics": topics}


def refuse_offset_fetch(request: Any, code: ErrorCode, _: str) -> Mapping[str, Any]:
    """Return the answer with one code for every group."""
    code = retriable_by_members(code)
    groups = getattr(request, "groups", None)
    if groups is None:
        return _refused_group(request.topics, code)
    return {
        "groups": [{"group_id": one.group_id, **_refused_group(one.topics, code)} for one in groups]
    }


# -- OffsetDelete --------------------------------------------------------------------------------


async def answer_offset_delete(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Forget positions of topics that no member of the group reads.

    What a member reads is in its metadata, which is the clients' own; so it is refused for a group
    that has members.
    """
    desk, group_id = exchange.broker.groups, request.group_id
    key = desk.key(exchange, group_id)
    error = await desk.refusal(group_id)
    if error is None and desk.coordinator.group(key) is not None:
        error = ErrorCode.non_empty_group
    if error is not None:
        exchange.note(error)
        return {"error_code": error}
    asked: dict[str, list[int]] = {}
    mentions = ((topic.name, one) for topic in request.topics for one in topic.partitions)
    async for name, one in in_slices(mentions):
        asked.setdefault(name, []).append(one.partition_index)
    topics: list[tuple[str, list[tuple[int, ErrorCode]]]] = []
    async with desk.in_order(key):
        async for name, numbers in in_slices(asked.items()):
            code = ErrorCode.none
            try:
                await forget_positions(exchange, group_id, name, numbers)
            except StreamhouseError as failure:
                exchange.report(failure)
                code = code_for_members(failure)
                exchange.note(code)
            topics.append((name, [(number, code) for number in numbers]))
    return _by_topic(topics)
