"""Positions of consumer groups: the positions of the tables' consumers, on any shard.

A group is the consumer with the group's id and the caller's token. Positions in a table of another
shard are read and written there by HTTP, in the caller's name.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar
from urllib.parse import quote

from kio.schema.errors import ErrorCode

from streamhouse.core.errors import (
    BucketNotFoundError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OffsetOutOfRangeError,
    StreamhouseError,
    TableDamagedError,
    TableNotFoundError,
    UnavailableError,
)
from streamhouse.core.model.offsets import buckets_to_json, offsets_from_json
from streamhouse.core.model.table import TablePath
from streamhouse.core.model.table_state import TableState
from streamhouse.storage_service.engine.consumers import Consumer
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.kafka.groups.coordinator import GroupKey, unusable_group_id
from streamhouse.storage_service.kafka.topics import leader_epoch_of, topic_name_of
from streamhouse.storage_service.kafka_door._error_codes import error_code_of
from streamhouse.storage_service.kafka_door._exchange import KafkaExchange
from streamhouse.storage_service.kafka_door.broker._group_desk import (
    code_for_members,
)
from streamhouse.storage_service.kafka_door.broker._shard_calls import ask_shard, remote_endpoint
from streamhouse.storage_service.kafka_door.topics._table_identity import (
    NO_EPOCH,
    is_of_another,
)
from streamhouse.storage_service.kafka_door.topics._topic_tables import (
    path_among_shards,
    remote_table,
    topic_table,
)
from streamhouse.storage_service.server.caller import SERVICE, Level
from streamhouse.storage_service.server.status.event_loop import in_slices

__all__ = [
    "NO_OFFSETS",
    "Position",
    "RemoteTable",
    "TablePositions",
    "all_positions",
    "commit_positions",
    "forget_positions",
    "keep_positions",
    "locate_table",
    "may_see_all",
    "positions",
    "refusal",
    "settle_commits",
]

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_R = TypeVar("_R")

_PEER_TIMEOUT_S: Final = 5.0
# Stand-ins for the latest and the earliest offset in ListOffsets. A committed position below 0
# means no position, and the consumer begins by its reset policy.
NO_OFFSETS: Final = frozenset((-1, -2))
_AT_ONCE: Final = 8


class RemoteTable:
    """A table of another shard, for requests about a group in the table."""

    def __init__(
        self, exchange: KafkaExchange, path: TablePath, endpoint: str, *, table_id: int | None
    ) -> None:
        """`table_id` is the id from the other shard, or None if not yet requested."""
        self.path = path
        self.table_id = table_id
        self._exchange = exchange
        self._endpoint = endpoint

    async def find(self, group_id: str) -> Mapping[int, int] | None:
        """Return the positions of the caller's group; raises as the other shard does."""
        try:
            return (await self.find_all({group_id}, of_others=False)).get(group_id)
        except NotFoundError as error:
            raise _moved_error(self.path) from error

    async def find_all(
        self, group_ids: Container[str], *, of_others: bool
    ) -> dict[str, Mapping[int, int]]:
        """Return the positions of the groups with positions; raises as `find`.

        With `of_others` the answer includes groups of other tokens, unless the caller has a group
        of the same name.
        """
        answer = await self._ask("GET", "/consumers")
        positions: dict[str, Mapping[int, int]] = {}
        own_names = set()
        try:
            for consumer in answer["consumers"]:
                name, is_own = consumer["name"], consumer["is_own"]
                if name in group_ids and (is_own or (of_others and name not in positions)):
                    if name not in own_names:
                        positions[name] = offsets_from_json(consumer["offsets"])
                    own_names |= {name} if is_own else set()
            self.table_id = int(answer["table_id"])
            return positions
        except (ValueError, KeyError, TypeError) as error:
            raise InternalError(
                f"the answer of another shard is no list of consumers: {error}"
            ) from error

    async def report(
        self, group_id: str, offsets: Mapping[int, int], *, is_part: bool, is_durable: bool = True
    ) -> None:
        """Report the group's positions to the other shard; raises as the other shard does."""
        body = {
            "table_id": self.table_id,
            "offsets": buckets_to_json(offsets),
            "reads_lake": True,
            "durable": is_durable,
            "part": is_part,
        }
        await self._ask("PUT", f"/consumers/{quote(group_id)}", json.dumps(body).encode())

    async def forget(self, group_id: str) -> None:
        """Delete the group's positions on the other shard; raises as the other shard does."""
        await self._ask("DELETE", f"/consumers/{quote(group_id)}")

    async def ends(self) -> Mapping[int, int]:
        """Return the end of each partition; raises as the other shard does."""
        state = TableState.from_json(await self._ask("GET", "/state"))
        return {bucket: at.high_watermark for bucket, at in state.positions.items()}

    async def _ask(self, method: str, subpath: str, body: bytes = b"") -> Any:
        return await ask_shard(
            self._exchange,
            self._endpoint,
            method,
            f"/v1/tables/{self.path}{subpath}",
            body=body,
            timeout_s=_PEER_TIMEOUT_S,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A committed position of a partition, and the leader epoch of the table that was read."""

    offset: int
    """One of `NO_OFFSETS` removes the position: tools reset groups in this way."""
    leader_epoch: int = NO_EPOCH


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePositions:
    """The positions of a group in a table, by partition."""

    offsets: Mapping[int, int] = field(default_factory=dict)
    leader_epoch: int = NO_EPOCH
    """The table's epoch, if there are offsets and the epoch is known."""


def _moved_error(path: TablePath) -> UnavailableError:
    # The table was there a moment ago: dropped since, or moving again. A retry gets the answer.
    return UnavailableError(f"table '{path}' has left its shard; try again")


async def locate_table(exchange: KafkaExchange, topic: str) -> OpenTable | RemoteTable:
    """Return the table of a topic, on any shard, for a reader; raises as `topic_table`."""
    try:
        return topic_table(exchange, topic, Level.READ)
    except NotFoundError:
        path = await path_among_shards(exchange, topic, Level.READ)
        endpoint = await remote_endpoint(exchange, path)
        if endpoint is not None:
            try:
                info = await remote_table(exchange, topic, path, endpoint)
            except NotFoundError as error:
                raise _moved_error(path) from error
            return RemoteTable(exchange, path, endpoint, table_id=info.table_id)
        # The table may have come to this shard during the lookup.
        return topic_table(exchange, topic, Level.READ)


# -- committing ----------------------------------------------------------------------------------


async def commit_positions(
    exchange: KafkaExchange, group_id: str, topic: str, positions: Mapping[int, Position]
) -> dict[int, ErrorCode]:
    """Commit the group's positions in one topic; return a code for each partition.

    Positions with the code `none` are on disk. Further positions of the group in the topic stay.
    Positions of an earlier table of the same name are refused with `FENCED_LEADER_EPOCH`.
    """
    codes = dict.fromkeys(positions, ErrorCode.none)
    key = exchange.caller.name, group_id
    try:
        table = await locate_table(exchange, topic)
        codes |= _fenced_partitions(exchange, key, topic, _table_id(table), positions)
        offsets = {b: at.offset for b, at in positions.items() if codes[b] is ErrorCode.none}
        resets = [bucket for bucket, offset in offsets.items() if offset in NO_OFFSETS]
        if not isinstance(table, RemoteTable):
            codes |= _refusals(_ends(table, offsets), offsets)
        elif any(at < 0 for at in offsets.values()):
            codes |= _refusals(await table.ends(), offsets)
        resets = [bucket for bucket in resets if codes[bucket] is ErrorCode.none]
        if resets:
            await forget_positions(exchange, group_id, topic, resets, table=table)
        accepted = {b: at for b, at in offsets.items() if codes[b] is ErrorCode.none and at >= 0}
        if accepted and isinstance(table, RemoteTable):
            codes |= await _commit_remotely(table, group_id, accepted)
        elif accepted and not isinstance(table, RemoteTable):
            await _report(exchange, table, group_id, accepted, is_part=True)
        exchange.broker.groups.note_positions(key, topic)
    except StreamhouseError as error:
        exchange.report(error)
        return dict.fromkeys(positions, code_for_members(error))
    return codes


def _table_id(table: OpenTable | RemoteTable) -> int:
    table_id = table.table_id if isinstance(table, RemoteTable) else table.info.table_id
    assert table_id is not None, "`locate_table` has requested the id"
    return table_id


def _fenced_partitions(
    exchange: KafkaExchange,
    key: GroupKey,
    topic: str,
    table_id: int,
    positions: Mapping[int, Position],
) -> dict[int, ErrorCode]:
    """Return the partitions whose positions were read in another table of the name."""
    is_fenced = exchange.client.read_tables.commits_to_other_table(key, topic, table_id)
    return {
        bucket: ErrorCode.fenced_leader_epoch
        for bucket, at in positions.items()
        if is_of_another(table_id, at.leader_epoch) or (is_fenced and at.leader_epoch <= 0)
    }


async def _commit_remotely(
    table: RemoteTable, group_id: str, offsets: Mapping[int, int]
) -> Mapping[int, ErrorCode]:
    """Commit the acceptable positions; return the codes of the refused partitions."""
    try:
        await table.report(group_id, offsets, is_part=True)
        return {}
    except (BucketNotFoundError, InvalidRequestError, OffsetOutOfRangeError):
        # One refused partition fails the whole report.
        refused = _refusals(await table.ends(), offsets)
        if not refused:
            raise
    accepted = {bucket: at for bucket, at in offsets.items() if bucket not in refused}
    if accepted:
        await table.report(group_id, accepted, is_part=True)
    return refused


def _ends(table: OpenTable, buckets: Iterable[int]) -> Mapping[int, int]:
    existing = (bucket for bucket in buckets if 0 <= bucket < len(table.tablets))
    return {bucket: table.tablets[bucket].high_watermark for bucket in existing}


def _refusals(ends: Mapping[int, int], offsets: Mapping[int, int]) -> dict[int, ErrorCode]:
    """Return the missing partitions, and the partitions with an offset beyond the end."""
    refused = {}
    for bucket, offset in offsets.items():
        if bucket not in ends:
            refused[bucket] = ErrorCode.unknown_topic_or_partition
        elif offset not in NO_OFFSETS and not 0 <= offset <= ends[bucket]:
            # Such a position would skip rows for good.
            refused[bucket] = ErrorCode.offset_out_of_range
    return refused


async def _report(
    exchange: KafkaExchange,
    table: OpenTable,
    group_id: str,
    offsets: Mapping[int, int],
    *,
    is_part: bool,
    is_durable: bool = True,
) -> None:
    service = exchange.service
    service.check_write()
    present_table = service.table(str(table.path))
    if present_table.info.table_id != table.info.table_id:
        raise TableNotFoundError(
            f"table '{table.path}' was created again meanwhile; repeat the request"
        )
    await present_table.consumers.report(
        group_id,
        owner=exchange.caller.name,
        offsets=offsets,
        reads_lake=True,
        ttl_ms=table.properties.log_consumers_ttl_ms,
        is_durable=is_durable,
        is_part=is_part,
    )
    service.check_written()


async def keep_positions(exchange: KafkaExchange, group_id: str, topics: Iterable[str]) -> None:
    """Keep the positions of a group with members from expiring."""

    async def keep(topic: str) -> None:
        if exchange.broker.groups.is_closed:
            return
        try:
            table = await locate_table(exchange, topic)
            if isinstance(table, RemoteTable):
                await table.report(group_id, {}, is_part=True, is_durable=False)
            elif _find(exchange, table, group_id) is not None:
                await _report(exchange, table, group_id, {}, is_part=True, is_durable=False)
        except StreamhouseError as error:
            _logger.info("event=group_not_kept topic=%s why=%r", topic, error.message)

    await _some_at_once(keep, topics)


# -- asking --------------------------------------------------------------------------------------


async def positions(
    exchange: KafkaExchange, group_id: str, topic: str
) -> TablePositions | ErrorCode:
    """Return the group's positions in one topic, or the error code for the topic's partitions.

    Raises `StreamhouseError` if the positions are unavailable at the moment: an answer without
    positions would reset the group.
    """
    try:
        table = await locate_table(exchange, topic)
        if isinstance(table, RemoteTable):
            offsets = await table.find(group_id)
        else:
            consumer = _find(exchange, table, group_id)
            offsets = None if consumer is None else consumer.offsets
    except NotFoundError:
        return TablePositions()
    except StreamhouseError as error:
        code = error_code_of(error)
        if code_for_members(error) is not code:
            raise
        exchange.report(error)
        return code
    key, table_id = (exchange.caller.name, group_id), _table_id(table)
    exchange.client.read_tables.note_position(key, topic, table_id)
    if offsets is None:
        return TablePositions()
    exchange.broker.groups.note_positions(key, topic)
    return TablePositions(offsets=offsets, leader_epoch=leader_epoch_of(table_id))


async def refusal(exchange: KafkaExchange, group_id: str) -> ErrorCode | None:
    """Return the code for an unusable group id, or for a group of another shard."""
    if unusable_group_id(group_id) is not None:
        return ErrorCode.invalid_group_id
    return await exchange.broker.groups.refusal(group_id)


async def settle_commits(exchange: KafkaExchange, group_ids: Iterable[str]) -> None:
    """Return when all present commits of the groups are on disk."""
    desk = exchange.broker.groups
    async for group_id in in_slices(group_ids):
        async with desk.in_order(desk.key(exchange, group_id)):
            pass


async def all_positions(
    exchange: KafkaExchange, group_ids: Iterable[str]
) -> dict[str, dict[str, TablePositions]]:
    """Return groups' positions by topic and partition, in all tables that the caller may read.

    Each table is read a single time for all groups. Raises `StreamhouseError` if a shard with
    tables does not answer.
    """
    positions: dict[str, dict[str, TablePositions]] = {group_id: {} for group_id in group_ids}
    if not positions:
        return positions
    of_others = may_see_all(exchange)
    async for open_table in in_slices(_local_tables(exchange)):
        topic = topic_name_of(open_table.path, open_table.info.descriptor.properties)
        # The caller's own group precedes groups of other tokens with the same name.
        for consumer in open_table.readers():
            is_own = consumer.owner == exchange.caller.name
            if consumer.name in positions and (is_own or of_others):
                group_positions = TablePositions(
                    offsets=consumer.offsets, leader_epoch=leader_epoch_of(open_table.info.table_id)
                )
                topics = positions[consumer.name]
                topics[topic] = group_positions if is_own else topics.get(topic, group_positions)

    async def ask(table: RemoteTable) -> tuple[TablePath, Mapping[str, Mapping[int, int]]]:
        try:
            return table.path, await table.find_all(positions, of_others=of_others)
        except (NotFoundError, TableDamagedError):
            return table.path, {}

    answers = await _some_at_once(ask, await _remote_tables(exchange))
    remote_positions = {
        path: table_positions for path, table_positions in answers if table_positions
    }
    topic_names = await _topics_elsewhere(exchange, remote_positions.keys())
    for path, table_positions in remote_positions.items():
        for group_id, offsets in table_positions.items():
            positions[group_id][topic_names[path]] = TablePositions(offsets=offsets)
    return positions


async def _some_at_once(do: Callable[[_T], Awaitable[_R]], items: Iterable[_T]) -> list[_R]:
    turns = asyncio.Semaphore(_AT_ONCE)

    async def in_turn(item: _T) -> _R:
        async with turns:
            return await do(item)

    return await asyncio.gather(*(in_turn(item) for item in items))


async def _topics_elsewhere(
    exchange: KafkaExchange, paths: Collection[TablePath]
) -> Mapping[TablePath, str]:
    """Return the topic names of remote tables, as reported by the shards."""
    names: dict[TablePath, str] = {}
    for is_fresh in (False, True):
        if names.keys() >= set(paths):
            return names
        for broker in await exchange.broker.others.all(exchange, is_fresh=is_fresh):
            names |= {path: topic.name for path, topic in broker.topics.items()}
    # A shard without a Kafka door reports no names.
    return {path: topic_name_of(path, {}) for path in paths} | names


def _find(exchange: KafkaExchange, table: OpenTable, group_id: str) -> Consumer | None:
    ttl_ms = table.properties.log_consumers_ttl_ms
    return table.consumers.find(group_id, owner=exchange.caller.name, ttl_ms=ttl_ms)


def may_see_all(exchange: KafkaExchange) -> bool:
    """Return whether the caller administers the service, and so sees the groups of all tokens."""
    return exchange.caller.may(Level.ADMIN, SERVICE)


def _local_tables(exchange: KafkaExchange) -> list[OpenTable]:
    tables = exchange.service.manager.open_tables()
    return [table for table in tables if exchange.caller.may(Level.READ, str(table.path))]


async def _remote_tables(exchange: KafkaExchange) -> list[RemoteTable]:
    shards = exchange.service.shards
    if shards is None:
        return []
    owners = {state.shard: state.owner for state in await shards.states() if state.is_live}
    remote_tables = []
    for path, shard in sorted((await shards.tables()).items()):
        if shard == shards.own or not exchange.caller.may(Level.READ, str(path)):
            continue
        owner = owners.get(shard)
        if owner is None or owner.endpoint is None:
            raise await shards.elsewhere(path) or InternalError(f"shard '{shard}' has no owner")
        remote_tables.append(RemoteTable(exchange, path, owner.endpoint, table_id=None))
    return remote_tables


# -- forgetting ----------------------------------------------------------------------------------


async def forget_positions(
    exchange: KafkaExchange,
    group_id: str,
    topic: str,
    partitions: Iterable[int] | None = None,
    *,
    table: OpenTable | RemoteTable | None = None,
) -> None:
    """Delete the group's positions in one topic, or in some partitions of the topic.

    Positions of another token's group are deleted all together, because the caller may not read
    any. `table` is the topic's table if already located. Raises as `locate_table`.
    """
    table = table or await locate_table(exchange, topic)
    kept_offsets: dict[int, int] = {}
    if partitions is not None:
        table_positions = await positions(exchange, group_id, topic)
        deleted = set(partitions)
        offsets: Mapping[int, int] = (
            table_positions.offsets if isinstance(table_positions, TablePositions) else {}
        )
        if not offsets:
            return
        kept_offsets = {bucket: at for bucket, at in offsets.items() if bucket not in deleted}
    if isinstance(table, RemoteTable):
        if kept_offsets:
            await table.report(group_id, kept_offsets, is_part=False)
        else:
            await table.forget(group_id)
        return
    if kept_offsets:
        await _report(exchange, table, group_id, kept_offsets, is_part=False)
        return
    service = exchange.service
    service.check_write()
    await service.table(str(table.path)).consumers.forget(
        group_id, owner=exchange.caller.name, of_others=may_see_all(exchange)
    )
    service.check_written()
