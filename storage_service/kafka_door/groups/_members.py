"""Requests of group members and of administration tools; `kafka/groups/` has the rules."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from streamhouse.core.errors import ForbiddenError, StreamhouseError
from streamhouse.storage_service.kafka.groups.coordinator import GroupKey
from streamhouse.storage_service.kafka.groups.group import Group, GroupState
from streamhouse.storage_service.kafka.groups.messages import (
    Identity,
    JoinAnswer,
    JoinRequest,
    SyncAnswer,
    SyncRequest,
)
from streamhouse.storage_service.kafka_door._exchange import KafkaExchange
from streamhouse.storage_service.kafka_door.broker._group_desk import (
    code_for_members,
    retriable_by_members,
)
from streamhouse.storage_service.kafka_door.groups._positions import (
    all_positions,
    forget_positions,
    keep_positions,
    may_see_all,
    refusal,
    settle_commits,
)
from streamhouse.storage_service.server.status.event_loop import in_slices

__all__ = [
    "answer_delete_groups",
    "answer_describe_groups",
    "answer_heartbeat",
    "answer_join_group",
    "answer_leave_group",
    "answer_list_groups",
    "answer_sync_group",
    "refuse_delete_groups",
    "refuse_describe_groups",
    "refuse_member",
]

# The first versions whose clients know a feature.
_MEMBER_ID_VERSION: Final = 4
_SKIP_VERSION: Final = 9
_MANY_LEAVE_VERSION: Final = 3
_CLASSIC: Final = "classic"
_LEAVING_AT_ONCE: Final = 100
# For each connection: a client is in one group per connection, and tools are in few.
_MEMBERSHIPS_MAX: Final = 100
# After `member_id_required` the client joins again with the answered id.
_ID_GIVING_CODES: Final = frozenset((ErrorCode.none, ErrorCode.member_id_required))


def refuse_member(_: Any, code: ErrorCode, __: str) -> Mapping[str, Any]:
    """Return the answer of a member's call with an error code."""
    return {"error_code": retriable_by_members(code)}


def refuse_describe_groups(request: Any, code: ErrorCode, _: str) -> Mapping[str, Any]:
    """Return an answer with the code for every group."""
    code = retriable_by_members(code)
    return {"groups": [{"group_id": group_id, "error_code": code} for group_id in request.groups]}


def refuse_delete_groups(request: Any, code: ErrorCode, _: str) -> Mapping[str, Any]:
    """Return an answer with the code for every group."""
    code = retriable_by_members(code)
    return {
        "results": [{"group_id": group_id, "error_code": code} for group_id in request.groups_names]
    }


def _identity(request: Any) -> Identity:
    return Identity(
        member_id=request.member_id, instance_id=getattr(request, "group_instance_id", None)
    )


# -- members -------------------------------------------------------------------------------------


async def answer_join_group(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Add a member to the next generation; the answer waits for the generation."""
    desk = exchange.broker.groups
    key = desk.key(exchange, request.group_id)
    error = await desk.refusal(request.group_id)
    if error is None and not exchange.caller.reads_tables():
        # Such a member could read none of its partitions, and groups take memory.
        name = exchange.caller.name
        exchange.report(
            ForbiddenError(f"token '{name}' may read no table, and may therefore join no group")
        )
        error = ErrorCode.group_authorization_failed
    if error is not None:
        exchange.note(error)
        return {"error_code": error, "member_id": request.member_id}
    session = request.session_timeout
    join_request = JoinRequest(
        identity=_identity(request),
        client_id=exchange.client_id,
        client_host=f"/{exchange.client_address}",
        session_timeout_s=session.total_seconds(),
        rebalance_timeout_s=getattr(request, "rebalance_timeout", session).total_seconds(),
        protocol_type=request.protocol_type,
        protocols={protocol.name: protocol.metadata for protocol in request.protocols},
        requires_member_id=exchange.api_version >= _MEMBER_ID_VERSION,
        can_skip=exchange.api_version >= _SKIP_VERSION,
    )

    def joined(answer: JoinAnswer) -> None:
        members = exchange.client.members
        if answer.error in _ID_GIVING_CODES and (key in members or len(members) < _MEMBERSHIPS_MAX):
            members[key] = answer.member_id

    answer: JoinAnswer = await desk.wait(
        exchange,
        key,
        request.member_id,
        lambda on_joined: desk.coordinator.join(key, join_request, on_joined),
        on_answer=joined,
    )
    exchange.note(answer.error)
    return {
        "error_code": answer.error,
        "generation_id": answer.generation,
        "protocol_type": answer.protocol_type,
        "protocol_name": answer.protocol or "",
        "leader": answer.leader,
        "skip_assignment": answer.is_assigned,
        "member_id": answer.member_id,
        "members": [
            {
                "member_id": member.identity.member_id,
                "group_instance_id": member.identity.instance_id,
                "metadata": member.metadata,
            }
            for member in answer.members
        ],
    }


async def answer_sync_group(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Answer a member with its assignment, after the leader has sent all assignments."""
    desk = exchange.broker.groups
    key = desk.key(exchange, request.group_id)
    error = await desk.refusal(request.group_id)
    if error is not None:
        exchange.note(error)
        return {"error_code": error}
    sync_request = SyncRequest(
        identity=_identity(request),
        generation=request.generation_id,
        protocol_type=getattr(request, "protocol_type", None),
        protocol=getattr(request, "protocol_name", None),
        assignments={member.member_id: member.assignment for member in request.assignments},
    )
    answer: SyncAnswer = await desk.wait(
        exchange,
        key,
        request.member_id,
        lambda on_synced: desk.coordinator.sync(key, sync_request, on_synced),
    )
    exchange.note(answer.error)
    return {
        "error_code": answer.error,
        "protocol_type": answer.protocol_type,
        "protocol_name": answer.protocol,
        "assignment": answer.assignment,
    }


async def answer_heartbeat(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Record that a member is alive, and keep the positions of the member's group."""
    desk = exchange.broker.groups
    key = desk.key(exchange, request.group_id)
    error = await desk.refusal(request.group_id)
    if error is None:
        error = desk.coordinator.heartbeat(key, _identity(request), request.generation_id)
    if error is ErrorCode.none and (topics := desk.due_to_keep(key)):
        # The answer does not wait for other shards, which may take longer than a session lasts.
        desk.keep(key, keep_positions(exchange, request.group_id, topics))
    exchange.note(error)
    return {"error_code": error}


async def answer_leave_group(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Remove members at once."""
    desk = exchange.broker.groups
    error = await desk.refusal(request.group_id)
    if error is not None:
        exchange.note(error)
        return {"error_code": error}
    is_many = exchange.api_version >= _MANY_LEAVE_VERSION
    key = desk.key(exchange, request.group_id)
    leaving = request.members if is_many else [request]
    members = []
    async for first in in_slices(range(0, len(leaving), _LEAVING_AT_ONCE)):
        identities = [_identity(member) for member in leaving[first : first + _LEAVING_AT_ONCE]]
        for result in desk.coordinator.leave(key, identities):
            exchange.note(result.error)
            members.append(
                {
                    "member_id": result.identity.member_id,
                    "group_instance_id": result.identity.instance_id,
                    "error_code": result.error,
                }
            )
        desk.look()
    if not is_many:
        return {"error_code": members[0]["error_code"]}
    return {"error_code": ErrorCode.none, "members": members}


# -- tools that look at groups
# -------------------------------------------------------------------------


async def answer_describe_groups(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Describe each named group once; a group without members and positions is dead."""
    groups = dict[str, Mapping[str, Any]]()
    absent = []
    async for group_id in in_slices(dict.fromkeys(request.groups)):
        error = await refusal(exchange, group_id)
        group = _group(exchange, group_id)
        if error is not None:
            groups[group_id] = _failed(exchange, group_id, error)
        elif group is None:
            absent.append(group_id)
        else:
            groups[group_id] = _described(group_id, group)
    try:
        positions = await all_positions(exchange, absent)
    except StreamhouseError as failure:
        exchange.report(failure)
        code = code_for_members(failure)
        groups |= {name: _failed(exchange, name, code) for name in absent}
    else:
        async for group_id in in_slices(absent):
            state = GroupState.EMPTY if positions[group_id] else GroupState.DEAD
            groups[group_id] = {"group_id": group_id, "group_state": state.value}
    return {"groups": [groups[group_id] for group_id in dict.fromkeys(request.groups)]}


def _failed(exchange: KafkaExchange, group_id: str, code: ErrorCode) -> Mapping[str, Any]:
    exchange.note(code)
    return {"group_id": group_id, "error_code": code}


def _described(group_id: str, group: Group) -> Mapping[str, Any]:
    is_stable = group.state is GroupState.STABLE
    return {
        "group_id": group_id,
        "group_state": group.state.value,
        "protocol_type": group.protocol_type or "",
        "protocol_data": (group.protocol or "") if is_stable else "",
        "members": [
            {
                "member_id": member.identity.member_id,
                "group_instance_id": member.identity.instance_id,
                "client_id": member.client_id,
                "client_host": member.client_host,
                "member_metadata": member.metadata,
                "member_assignment": member.assignment,
            }
            for member in group.members()
        ],
    }


def _group(exchange: KafkaExchange, group_id: str) -> Group | None:
    """Return the caller's group of this id; an administrator also gets another token's group."""
    coordinator = exchange.broker.groups.coordinator
    own_group = coordinator.group(exchange.broker.groups.key(exchange, group_id))
    if own_group is not None or not may_see_all(exchange):
        return own_group
    return next(iter(coordinator.groups_named(group_id)), None)


async def answer_list_groups(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """List the groups of this process: groups with members, and groups with positions here."""
    states = {state.lower() for state in getattr(request, "states_filter", ())}
    types = {kind.lower() for kind in getattr(request, "types_filter", ())}
    groups = []
    if not types or _CLASSIC in types:
        idle_groups = await _groups_with_positions(exchange)
        listed = {name: _listed(name, None) async for name in in_slices(idle_groups)}
        async for key, group in _live(exchange):
            listed[key[1]] = _listed(key[1], group)
        async for group_id in in_slices(sorted(listed)):
            state = str(listed[group_id]["group_state"]).lower()
            if states and state not in states:
                continue
            if await exchange.broker.groups.refusal(group_id) is None:
                groups.append(listed[group_id])
    return {"error_code": ErrorCode.none, "groups": groups}


def _listed(group_id: str, group: Group | None) -> Mapping[str, Any]:
    state = GroupState.EMPTY if group is None else group.state
    return {
        "group_id": group_id,
        "protocol_type": "" if group is None else group.protocol_type or "",
        "group_state": state.value,
        "group_type": _CLASSIC,
    }


async def _live(exchange: KafkaExchange) -> AsyncIterator[tuple[GroupKey, Group]]:
    coordinator, sees_all = exchange.broker.groups.coordinator, may_see_all(exchange)
    async for key, group in in_slices(coordinator.groups()):
        if sees_all or key[0] == exchange.caller.name:
            yield key, group


async def _groups_with_positions(exchange: KafkaExchange) -> set[str]:
    sees_all = may_see_all(exchange)
    return {
        consumer.name
        async for table in in_slices(exchange.service.manager.open_tables())
        for consumer in table.readers()
        if sees_all or consumer.owner == exchange.caller.name
    }


async def answer_delete_groups(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Delete groups without members, with their positions in all tables."""
    codes = dict[str, ErrorCode]()
    async for group_id in in_slices(dict.fromkeys(request.groups_names)):
        error = await refusal(exchange, group_id)
        if error is None and _group(exchange, group_id) is not None:
            error = ErrorCode.non_empty_group
        codes[group_id] = error or ErrorCode.none
    deleted = [group_id for group_id, code in codes.items() if code is ErrorCode.none]
    try:
        await settle_commits(exchange, deleted)
        positions = await all_positions(exchange, deleted)
    except StreamhouseError as failure:
        exchange.report(failure)
        codes |= dict.fromkeys(deleted, code_for_members(failure))
    else:
        async for group_id in in_slices(deleted):
            codes[group_id] = await _delete(exchange, group_id, positions[group_id])
    for code in codes.values():
        exchange.note(code)
    return {
        "results": [{"group_id": group_id, "error_code": code} for group_id, code in codes.items()]
    }


async def _delete(exchange: KafkaExchange, group_id: str, topics: Collection[str]) -> ErrorCode:
    """Delete a group with positions in `topics`."""
    if not topics:
        return ErrorCode.group_id_not_found
    desk = exchange.broker.groups
    try:
        async with desk.in_order(desk.key(exchange, group_id)):
            for topic in topics:
                await forget_positions(exchange, group_id, topic)
    except StreamhouseError as failure:
        exchange.report(failure)
        return code_for_members(failure)
    return ErrorCode.none
