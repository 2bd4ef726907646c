"""Positions of consumer groups: they are those of the consumers of our tables, wherever those are.

A group is the consumer of its id and its token. What a table of another shard knows is asked and
told there by HTTP, in the caller's name.
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
from streamhouse.storage_service.kafka_door.broker._shard_calls import ask_shard, elsewhere
from streamhouse.storage_service.kafka_door.topics._table_identity import (
    NO_EPOCH,
    is_of_another,
)
from streamhouse.storage_service.kafka_door.topics._topic_tables import (
    path_among_shards,
    table_there,
    topic_table,
)
from streamhouse.storage_service.server.caller import SERVICE, Level
from streamhouse.storage_service.server.status.event_loop import in_slices

__all__ = [
    "NO_OFFSETS",
    "Elsewhere",
    "Position",
    "Standing",
    "all_positions",
    "commit_positions",
    "forget_positions",
    "found_table",
    "keep_positions",
    "may_see_all",
    "positions",
    "refusal",
    "settle_commits",
]

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_R = TypeVar("_R")

_PEER_TIMEOUT_S: Final = 5.0
# The latest and the earliest offset of ListOffsets. A committed position below 0 is none, and its
# consumer begins where its reset policy says.
NO_OFFSETS: Final = frozenset((-1, -2))
_AT_ONCE: Final = 8


class Elsewhere:
    """A table that another shard has, and what that one answers about a group there."""

    def __init__(
        self, exchange: KafkaExchange, path: TablePath, endpoint: str, *, table_id: int | None
    ) -> None:
        """`table_id` is that of the table as the other shard told it, None if it was not asked."""
        self.path = path
        self.table_id = table_id
        self._exchange = exchange
        self._endpoint = endpoint

    async def find(self, group_id: str) -> Mapping[int, int] | None:
        """Return the caller's group's positions; raises as the other shard does."""
        try:
            return (await self.find_all({group_id}, of_others=False)).get(group_id)
        except NotFoundError as error:
            raise _has_left(self.path) from error

    async def find_all(
        self, group_ids: Container[str], *, of_others: bool
    ) -> dict[str, Mapping[int, int]]:
        """Return the positions of those of these groups that have some; raises as `find`.

        With `of_others` also those of other tokens' groups, where the caller has none of the name.
        """
        answer = await self._ask("GET", "/consumers")
        found: dict[str, Mapping[int, int]] = {}
        own = set()
        try:
            for one in answer["consumers"]:
                name, is_own = one["name"], one["is_own"]
                if name in group_ids and (is_own or (of_others and name not in found)):
                    if name not in own:
                        found[name] = offsets_from_json(one["offsets"])
                    own |= {name} if is_own else set()
            self.table_id = int(answer["table_id"])
            return found
        except (ValueError, KeyError, TypeError) as error:
            raise InternalError(f"another shard answers no list of consumers: {error}") from error

    async def report(
        self, group_id: str, offsets: Mapping[int, int], *, is_part: bool, is_durable: bool = True
    ) -> None:
        """Report the group's positions there; raises as the other shard does."""
        body = {
            "table_id": self.table_id,
            "offsets": buckets_to_json(offsets),
            "reads_lake": True,
            "durable": is_durable,
            "part": is_part,
        }
        await self._ask("PUT", f"/consumers/{quote(group_id)}", json.dumps(body).encode())

    async def forget(self, group_id: str) -> None:
        """Forget the group's positions there; raises as the other shard does."""
        await self._ask("DELETE", f"/consumers/{quote(group_id)}")

    async def ends(self) -> Mapping[int, int]:
        """Return where each partition ends; raises as the other shard does."""
        state = TableState.from_json(await self._ask("GET", "/state"))
        return {bucket: at.high_watermark for bucket, at in state.positions.items()}

    async def _ask(self, method: str, rest: str, body: bytes = b"") -> Any:
        return await ask_shard(
            self._exchange,
            self._endpoint,
            method,
            f"/v1/tables/{self.path}{rest}",
            body=body,
            timeout_s=_PEER_TIMEOUT_S,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """What is committed of a partition; `leader_epoch` is that of the table where it was read."""

    offset: int
    """One of `NO_OFFSETS` lets the group have no position: tools commit so to begin anew."""
    leader_epoch: int = NO_EPOCH


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a group is in one table, by partition."""

    offsets: Mapping[int, int] = field(default_factory=dict)
    leader_epoch: int = NO_EPOCH
    """That of the table, if there are offsets and it is known."""


def _has_left(path: TablePath) -> UnavailableError:
    # It was there a moment ago: dropped since, or on its way again. Who asks anew is told.
    return UnavailableError(f"table '{path}' has left its shard; try again")


async def found_table(exchange: KafkaExchange, topic: str) -> OpenTable | Elsewhere:
    """Return the table of a topic that the caller may read; raises as `topic_table`."""
    try:
        return topic_table(exchange, topic, Level.READ)
    except NotFoundError:
        path = await path_among_shards(exchange, topic, Level.READ)
        endpoint = await elsewhere(exchange, path)
        if endpoint is not None:
            try:
                info = await table_there(exchange, topic, path, endpoint)
            except NotFoundError as error:
                raise _has_left(path) from error
            return Elsewhere(exchange, path, endpoint, table_id=info.table_id)
        # It may have come here while the store was asked.
        return topic_table(exchange, topic, Level.READ)


# -- committing ----------------------------------------------------------------------------------


async def commit_positions(
    exchange: KafkaExchange, group_id: str, topic: str, positions: Mapping[int, Position]
) -> dict[int, ErrorCode]:
    """Commit the group's positions in one topic; return what each partition is answered.

    They are on disk where that is `none`. The others of the group in this topic stay. Positions of
    an earlier table of the name are refused with `FENCED_LEADER_EPOCH`.
    """
    codes = dict.fromkeys(positions, ErrorCode.none)
    key = exchange.caller.name, group_id
    try:
        table = await found_table(exchange, topic)
        codes |= _of_another(exchange, key, topic, _table_id(table), positions)
        offsets = {b: at.offset for b, at in positions.items() if codes[b] is ErrorCode.none}
        ended = [bucket for bucket, offset in offsets.items() if offset in NO_OFFSETS]
        if not isinstance(table, Elsewhere):
            codes |= _refusals(_ends(table, offsets), offsets)
        elif any(at < 0 for at in offsets.values()):
            codes |= _refusals(await table.ends(), offsets)
        ended = [bucket for bucket in ended if codes[bucket] is ErrorCode.none]
        if ended:
            await forget_positions(exchange, group_id, topic, ended, table=table)
        taken = {b: at for b, at in offsets.items() if codes[b] is ErrorCode.none and at >= 0}
        if taken and isinstance(table, Elsewhere):
            codes |= await _commit_there(table, group_id, taken)
        elif taken and not isinstance(table, Elsewhere):
            await _report(exchange, table, group_id, taken, is_part=True)
        exchange.broker.groups.stands_in(key, topic)
    except StreamhouseError as error:
        exchange.report(error)
        return dict.fromkeys(positions, code_for_members(error))
    return codes


def _table_id(table: OpenTable | Elsewhere) -> int:
    table_id = table.table_id if isinstance(table, Elsewhere) else table.info.table_id
    assert table_id is not None, "it was asked for when the table was found"
    return table_id


def _of_another(
    exchange: KafkaExchange,
    key: GroupKey,
    topic: str,
    table_id: int,
    positions: Mapping[int, Position],
) -> dict[int, ErrorCode]:
    """Return the partitions whose positions were read in another table."""
    is_other = exchange.client.read_tables.commits_to_other(key, topic, table_id)
    return {
        bucket: ErrorCode.fenced_leader_epoch
        for bucket, at in positions.items()
        if is_of_another(table_id, at.leader_epoch) or (is_other and at.leader_epoch <= 0)
    }


async def _commit_there(
    table: Elsewhere, group_id: str, offsets: Mapping[int, int]
) -> Mapping[int, ErrorCode]:
    """Commit what can be; return the partitions that refuse."""
    try:
        await table.report(group_id, offsets, is_part=True)
        return {}
    except (BucketNotFoundError, InvalidRequestError, OffsetOutOfRangeError):
        # One partition has refused for all of them.
        refused = _refusals(await table.ends(), offsets)
        if not refused:
            raise
    taken = {bucket: at for bucket, at in offsets.items() if bucket not in refused}
    if taken:
        await table.report(group_id, taken, is_part=True)
    return refused


def _ends(table: OpenTable, buckets: Iterable[int]) -> Mapping[int, int]:
    there = (bucket for bucket in buckets if 0 <= bucket < len(table.tablets))
    return {bucket: table.tablets[bucket].high_watermark for bucket in there}


def _refusals(ends: Mapping[int, int], offsets: Mapping[int, int]) -> dict[int, ErrorCode]:
    """Return the partitions that are not there, or where nobody can have read so far."""
    refused = {}
    for bucket, offset in offsets.items():
        if bucket not in ends:
            refused[bucket] = ErrorCode.unknown_topic_or_partition
        elif offset not in NO_OFFSETS and not 0 <= offset <= ends[bucket]:
            # A slip that would skip rows for good.
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
    now = service.table(str(table.path))
    if now.info.table_id != table.info.table_id:
        raise TableNotFoundError(f"table '{table.path}' was made again meanwhile; ask anew")
    await now.consumers.report(
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
    """Let positions of a group that has members not be forgotten, though they do not move."""

    async def keep(topic: str) -> None:
        if exchange.broker.groups.is_closed:
            return
        try:
            table = await found_table(exchange, topic)
            if isinstance(table, Elsewhere):
                await table.report(group_id, {}, is_part=True, is_durable=False)
            elif _find(exchange, table, group_id) is not None:
                await _report(exchange, table, group_id, {}, is_part=True, is_durable=False)
        except StreamhouseError as error:
            _logger.info("event=group_not_kept topic=%s why=%r", topic, error.message)

    await _some_at_once(keep, topics)


# -- asking --------------------------------------------------------------------------------------


async def positions(exchange: KafkaExchange, group_id: str, topic: str) -> Standing | ErrorCode:
    """Return the group's positions in one topic, or what its partitions are answered.

    Raises `StreamhouseError` where they are not known now: to say that there are none would make
    the group begin anew.
    """
    try:
        table = await found_table(exchange, topic)
        if isinstance(table, Elsewhere):
            found = await table.find(group_id)
        else:
            consumer = _find(exchange, table, group_id)
            found = None if consumer is None else consumer.offsets
    except NotFoundError:
        return Standing()
    except StreamhouseError as error:
        code = error_code_of(error)
        if code_for_members(error) is not code:
            raise
        exchange.report(error)
        return code
    key, table_id = (exchange.caller.name, group_id), _table_id(table)
    exchange.client.read_tables.told_position(key, topic, table_id)
    if found is None:
        return Standing()
    exchange.broker.groups.stands_in(key, topic)
    return Standing(offsets=found, leader_epoch=leader_epoch_of(table_id))


async def refusal(exchange: KafkaExchange, group_id: str) -> ErrorCode | None:
    """Return what is answered about a group that there cannot be, or not here."""
    if unusable_group_id(group_id) is not None:
        return ErrorCode.invalid_group_id
    return await exchange.broker.groups.refusal(group_id)


async def settle_commits(exchange: KafkaExchange, group_ids: Iterable[str]) -> None:
    """Return when the commits of these groups are on disk that were on their way."""
    desk = exchange.broker.groups
    async for group_id in in_slices(group_ids):
        async with desk.in_order(desk.key(exchange, group_id)):
            pass


async def all_positions(
    exchange: KafkaExchange, group_ids: Iterable[str]
) -> dict[str, dict[str, Standing]]:
    """Return groups' positions by topic and partition, in all tables that the caller may read.

    Each table is looked at once, however many groups are asked for. Raises `StreamhouseError` if a
    shard that has tables does not answer.
    """
    found: dict[str, dict[str, Standing]] = {group_id: {} for group_id in group_ids}
    if not found:
        return found
    of_others = may_see_all(exchange)
    async for here in in_slices(_readable_here(exchange)):
        topic = topic_name_of(here.path, here.info.descriptor.properties)
        # One's own group comes before those of others that have its name.
        for consumer in here.readers():
            is_own = consumer.owner == exchange.caller.name
            if consumer.name in found and (is_own or of_others):
                standing = Standing(
                    offsets=consumer.offsets, leader_epoch=leader_epoch_of(here.info.table_id)
                )
                topics = found[consumer.name]
                topics[topic] = standing if is_own else topics.get(topic, standing)

    async def ask(table: Elsewhere) -> tuple[TablePath, Mapping[str, Mapping[int, int]]]:
        try:
            return table.path, await table.find_all(found, of_others=of_others)
        except (NotFoundError, TableDamagedError):
            return table.path, {}

    answers = await _some_at_once(ask, await _readable_elsewhere(exchange))
    there = {path: known for path, known in answers if known}
    topics_there = await _topics_elsewhere(exchange, there.keys())
    for path, known in there.items():
        for group_id, offsets in known.items():
            found[group_id][topics_there[path]] = Standing(offsets=offsets)
    return found


async def _some_at_once(do: Callable[[_T], Awaitable[_R]], items: Iterable[_T]) -> list[_R]:
    turns = asyncio.Semaphore(_AT_ONCE)

    async def in_turn(item: _T) -> _R:
        async with turns:
            return await do(item)

    return await asyncio.gather(*(in_turn(item) for item in items))


async def _topics_elsewhere(
    exchange: KafkaExchange, paths: Collection[TablePath]
) -> Mapping[TablePath, str]:
    """Return what the topics of other shards' tables are called, as these shards say."""
    names: dict[TablePath, str] = {}
    for is_fresh in (False, True):
        if names.keys() >= set(paths):
            return names
        for other in await exchange.broker.others.all(exchange, is_fresh=is_fresh):
            names |= {path: topic.name for path, topic in other.topics.items()}
    # A shard that serves no Kafka clients says nothing.
    return {path: topic_name_of(path, {}) for path in paths} | names


def _find(exchange: KafkaExchange, table: OpenTable, group_id: str) -> Consumer | None:
    ttl_ms = table.properties.log_consumers_ttl_ms
    return table.consumers.find(group_id, owner=exchange.caller.name, ttl_ms=ttl_ms)


def may_see_all(exchange: KafkaExchange) -> bool:
    """Whether the caller looks after the service, and so after others' groups."""
    return exchange.caller.may(Level.ADMIN, SERVICE)


def _readable_here(exchange: KafkaExchange) -> list[OpenTable]:
    tables = exchange.service.manager.open_tables()
    return [one for one in tables if exchange.caller.may(Level.READ, str(one.path))]


async def _readable_elsewhere(exchange: KafkaExchange) -> list[Elsewhere]:
    shards = exchange.service.shards
    if shards is None:
        return []
    owners = {state.shard: state.owner for state in await shards.states() if state.is_live}
    found = []
    for path, shard in sorted((await shards.tables()).items()):
        if shard == shards.own or not exchange.caller.may(Level.READ, str(path)):
            continue
        owner = owners.get(shard)
        if owner is None or owner.endpoint is None:
            raise await shards.elsewhere(path) or InternalError(f"shard '{shard}' has no owner")
        found.append(Elsewhere(exchange, path, owner.endpoint, table_id=None))
    return found


# -- forgetting ----------------------------------------------------------------------------------


async def forget_positions(
    exchange: KafkaExchange,
    group_id: str,
    topic: str,
    partitions: Iterable[int] | None = None,
    *,
    table: OpenTable | Elsewhere | None = None,
) -> None:
    """Forget the group's positions in one topic, or in some of its partitions.

    Of another token's group none or all are forgotten: where it is nobody else says. `table` is
    the topic's if it was found already. Raises as `found_table`.
    """
    table = table or await found_table(exchange, topic)
    left: dict[int, int] = {}
    if partitions is not None:
        found = await positions(exchange, group_id, topic)
        gone = set(partitions)
        known: Mapping[int, int] = found.offsets if isinstance(found, Standing) else {}
        if not known:
            return
        left = {bucket: at for bucket, at in known.items() if bucket not in gone}
    if isinstance(table, Elsewhere):
        if left:
            await table.report(group_id, left, is_part=False)
        else:
            await table.forget(group_id)
        return
    if left:
        await _report(exchange, table, group_id, left, is_part=False)
        return
    service = exchange.service
    service.check_write()
    await service.table(str(table.path)).consumers.forget(
        group_id, owner=exchange.caller.name, of_others=may_see_all(exchange)
    )
    service.check_written()
