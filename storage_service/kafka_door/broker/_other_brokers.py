"""The other shards of a service as brokers: their addresses, and the topics that a caller may read.

Each is asked over HTTP with the caller's token, so a client is told of no topic that it may not
read. Answers are kept for seconds, as clients' own are. Who does not answer is as it was last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.kafka.topics import TopicTable, node_id_of
from streamhouse.storage_service.kafka_door.broker._broker_state import BrokerAddress, BrokerState
from streamhouse.storage_service.kafka_door.broker._shard_calls import Asking, ask_shard
from streamhouse.storage_service.server.shards import ShardState

__all__ = ["KnownTopic", "OtherBroker", "OtherBrokers"]

_logger = logging.getLogger(__name__)

_KEPT_S: Final = 2.0
_TIMEOUT_S: Final = 3.0
_CALLERS_MAX: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTopic:
    """A topic, and the broker that leads its partitions; none `is_led` while its table moves."""

    name: str
    path: TablePath
    table_id: int
    bucket_count: int
    node_id: int
    created_at_us: int
    is_led: bool = True

    @property
    def table(self) -> TopicTable:
        """What decides between two tables that a topic may be."""
        return TopicTable(
            path=self.path,
            topic=self.name,
            created_at_us=self.created_at_us,
            table_id=self.table_id,
        )


@dataclass(frozen=True, slots=True)
class OtherBroker:
    """Another shard that serves Kafka clients, and its topics, by path."""

    state: BrokerState
    topics: Mapping[TablePath, KnownTopic]


@dataclass(frozen=True, slots=True)
class _Known:
    """The others by shard as a caller was told of them, and when that is no longer answered."""

    others: Mapping[str, OtherBroker]
    until_s: float


class OtherBrokers:
    """What is known of the others, for each caller. Event loop only."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._asking: dict[str, asyncio.Future[Mapping[str, OtherBroker]]] = {}

    async def all(self, exchange: Asking, *, is_fresh: bool = False) -> list[OtherBroker]:
        """Return the others by shard, as they were seconds ago; `is_fresh`: as they are now."""
        shards = exchange.service.shards
        if shards is None:
            return []
        name = exchange.caller.name
        known = self._known.get(name)
        if known is not None and not is_fresh and _now_s() < known.until_s:
            return list(known.others.values())
        asking = self._asking.get(name)
        if asking is None:
            asking = asyncio.ensure_future(self._ask_all(exchange, name))
            self._asking[name] = asking
            asking.add_done_callback(lambda _: self._asking.pop(name, None))
        return list((await asyncio.shield(asking)).values())

    async def _ask_all(self, exchange: Asking, name: str) -> Mapping[str, OtherBroker]:
        shards = exchange.service.shards
        assert shards is not None
        known = self._known.pop(name, None)
        before = {} if known is None else known.others
        try:
            states = await shards.states()
        except StreamhouseError as error:
            _logger.warning("event=shards_unknown why=%r", error.message)
            found = before
        else:
            others = [state for state in states if state.shard != shards.own and state.is_live]
            asked = await asyncio.gather(*(self._ask(exchange, s, before) for s in others))
            found = {other.state.shard or "": other for other in asked if other is not None}
        while len(self._known) >= _CALLERS_MAX:
            del self._known[next(iter(self._known))]
        self._known[name] = _Known(found, _now_s() + _KEPT_S)
        return found

    async def _ask(
        self, exchange: Asking, state: ShardState, before: Mapping[str, OtherBroker]
    ) -> OtherBroker | None:
        """Return what one shard says; None if it serves no Kafka clients, or nobody knows."""
        endpoint = None if state.owner is None else state.owner.endpoint
        if endpoint is None:
            return before.get(state.shard)
        try:
            told = await ask_shard(
                exchange, endpoint, "GET", "/v1/kafka/topics", timeout_s=_TIMEOUT_S
            )
            return _read(state.shard, told)
        except StreamhouseError as error:
            _logger.warning("event=shard_does_not_answer shard=%s why=%r", state.shard, error)
        except (KeyError, TypeError, ValueError) as error:
            _logger.warning("event=shard_answers_nonsense shard=%s why=%r", state.shard, error)
        return before.get(state.shard)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _read(shard: str, told: Any) -> OtherBroker | None:
    if told["port"] is None:
        return None
    node_id = node_id_of(shard)
    topics = [
        KnownTopic(
            name=str(one["topic"]),
            path=TablePath.parse(one["table"]),
            table_id=int(one["table_id"]),
            bucket_count=int(one["bucket_count"]),
            node_id=node_id,
            # An older version does not say it.
            created_at_us=int(one.get("created_at_us", 0)),
            is_led=bool(one.get("is_led", True)),
        )
        for one in told["topics"]
    ]
    address = BrokerAddress(str(told["host"]), int(told["port"]))
    state = BrokerState(shard=shard, node_id=node_id, address=address)
    return OtherBroker(state, {topic.path: topic for topic in topics})
