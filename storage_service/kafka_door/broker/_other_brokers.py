"""The other shards of a service as brokers, with the topics readable for a caller.

Every shard is asked over HTTP with the caller's token, so the answer has readable topics only.
Answers are cached for seconds, as clients cache metadata. The last answer of a silent shard stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from streamhouse.core.errors import NotFoundError, StreamhouseError
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.kafka.topics import TopicTable, node_id_of
from streamhouse.storage_service.kafka_door.broker._broker_state import BrokerAddress, BrokerState
from streamhouse.storage_service.kafka_door.broker._shard_calls import ShardCaller, ask_shard
from streamhouse.storage_service.server.shards.other_shards import ShardState

__all__ = ["KnownTopic", "OtherBroker", "OtherBrokers"]

_logger = logging.getLogger(__name__)

_CACHED_S: Final = 2.0
_TIMEOUT_S: Final = 3.0
_CALLERS_MAX: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTopic:
    """A topic and the leading broker of its partitions; not `is_led` while the table moves."""

    name: str
    path: TablePath
    table_id: int
    bucket_count: int
    node_id: int
    created_at_us: int
    is_led: bool = True

    @property
    def table(self) -> TopicTable:
        """The candidate for the decision between two tables of a topic."""
        return TopicTable(
            path=self.path,
            topic=self.name,
            created_at_us=self.created_at_us,
            table_id=self.table_id,
        )


@dataclass(frozen=True, slots=True)
class OtherBroker:
    """A shard with a Kafka door, and the shard's topics by path."""

    state: BrokerState
    topics: Mapping[TablePath, KnownTopic]


@dataclass(frozen=True, slots=True)
class _CachedBrokers:
    """The brokers by shard for a caller, and the expiry of the cache entry."""

    others: Mapping[str, OtherBroker]
    until_s: float


class OtherBrokers:
    """The cached other brokers of each caller. Event loop only."""

    def __init__(self) -> None:
        self._cached: dict[str, _CachedBrokers] = {}
        self._asking: dict[str, asyncio.Future[Mapping[str, OtherBroker]]] = {}

    async def all(self, exchange: ShardCaller, *, is_fresh: bool = False) -> list[OtherBroker]:
        """Return the other brokers by shard, from a cache of seconds unless `is_fresh`."""
        shards = exchange.service.shards
        if shards is None:
            return []
        name = exchange.caller.name
        cached = self._cached.get(name)
        if cached is not None and not is_fresh and _now_s() < cached.until_s:
            return list(cached.others.values())
        asking = self._asking.get(name)
        if asking is None:
            asking = asyncio.ensure_future(self._ask_all(exchange, name))
            self._asking[name] = asking
            asking.add_done_callback(lambda _: self._asking.pop(name, None))
        return list((await asyncio.shield(asking)).values())

    async def _ask_all(self, exchange: ShardCaller, name: str) -> Mapping[str, OtherBroker]:
        shards = exchange.service.shards
        assert shards is not None
        expired = self._cached.pop(name, None)
        last_answers = {} if expired is None else expired.others
        try:
            states = await shards.states()
        except StreamhouseError as error:
            _logger.warning("event=shards_unknown why=%r", error.message)
            brokers = last_answers
        else:
            live_states = [state for state in states if state.shard != shards.own and state.is_live]
            answers = await asyncio.gather(
                *(self._ask(exchange, s, last_answers) for s in live_states)
            )
            brokers = {broker.state.shard or "": broker for broker in answers if broker is not None}
        while len(self._cached) >= _CALLERS_MAX:
            del self._cached[next(iter(self._cached))]
        self._cached[name] = _CachedBrokers(brokers, _now_s() + _CACHED_S)
        return brokers

    async def _ask(
        self, exchange: ShardCaller, state: ShardState, last_answers: Mapping[str, OtherBroker]
    ) -> OtherBroker | None:
        """Return a shard as a broker; None without a Kafka door or any answer."""
        endpoint = None if state.owner is None else state.owner.endpoint
        if endpoint is None:
            return last_answers.get(state.shard)
        try:
            answer = await ask_shard(
                exchange, endpoint, "GET", "/v1/kafka/topics", timeout_s=_TIMEOUT_S
            )
            return _read(state.shard, answer)
        except NotFoundError:
            # The shard serves no Kafka clients.
            return None
        except StreamhouseError as error:
            _logger.warning("event=shard_does_not_answer shard=%s why=%r", state.shard, error)
        except (KeyError, TypeError, ValueError) as error:
            _logger.warning("event=shard_answers_nonsense shard=%s why=%r", state.shard, error)
        return last_answers.get(state.shard)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _read(shard: str, answer: Any) -> OtherBroker | None:
    if answer["port"] is None:
        return None
    node_id = node_id_of(shard)
    topics = [
        KnownTopic(
            name=str(entry["topic"]),
            path=TablePath.parse(entry["table"]),
            table_id=int(entry["table_id"]),
            bucket_count=int(entry["bucket_count"]),
            node_id=node_id,
            # Older versions do not send these fields.
            created_at_us=int(entry.get("created_at_us", 0)),
            is_led=bool(entry.get("is_led", True)),
        )
        for entry in answer["topics"]
    ]
    address = BrokerAddress(str(answer["host"]), int(answer["port"]))
    state = BrokerState(shard=shard, node_id=node_id, address=address)
    return OtherBroker(state, {topic.path: topic for topic in topics})
