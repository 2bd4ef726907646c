"""DescribeCluster and FindCoordinator: the brokers, and the coordinator of a group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from streamhouse.core.errors import StreamhouseError
from streamhouse.storage_service.kafka.groups.coordinator import unusable_group_id
from streamhouse.storage_service.kafka_door._error_codes import RefusedError
from streamhouse.storage_service.kafka_door._exchange import KafkaExchange
from streamhouse.storage_service.kafka_door.broker._broker_state import BrokerState
from streamhouse.storage_service.kafka_door.topics._topic_tables import refusal_of
from streamhouse.storage_service.server.status.event_loop import in_slices

__all__ = ["all_brokers", "answer_describe_cluster", "answer_find_coordinator"]

_GROUP: Final = 0
_TRANSACTION: Final = 1
_BROKERS: Final = 1
# The first version that names several groups.
_MANY_VERSION: Final = 4


async def answer_describe_cluster(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Answer with the brokers of the service."""
    if getattr(request, "endpoint_type", _BROKERS) != _BROKERS:
        exchange.note(ErrorCode.mismatched_endpoint_type)
        return {
            "error_code": ErrorCode.mismatched_endpoint_type,
            "error_message": "this is a broker; there are no controllers to ask",
        }
    brokers = await all_brokers(exchange)
    return {
        "cluster_id": exchange.broker.cluster_id,
        "controller_id": exchange.broker.node_id,
        "brokers": [
            {"broker_id": b.node_id, "host": b.address.host, "port": b.address.port}
            for b in brokers
        ],
    }


async def answer_find_coordinator(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Answer with the coordinator of a group: the same broker, whichever broker is asked."""
    kind = getattr(request, "key_type", _GROUP)
    if exchange.api_version >= _MANY_VERSION:
        coordinators = [
            {"key": key, **await _coordinator(exchange, kind, key)}
            async for key in in_slices(request.coordinator_keys)
        ]
        return {"coordinators": coordinators}
    return await _coordinator(exchange, kind, request.key)


async def all_brokers(exchange: KafkaExchange) -> list[BrokerState]:
    """Return every broker of the service, this broker first."""
    remote_brokers = await exchange.broker.others.all(exchange)
    return [exchange.broker.own, *(broker.state for broker in remote_brokers)]


async def _coordinator(exchange: KafkaExchange, kind: int, key: str) -> dict[str, Any]:
    try:
        if kind == _TRANSACTION:
            raise RefusedError(
                ErrorCode.transactional_id_authorization_failed,
                f"transactional id '{key[:200]}': transactions of Kafka are not offered; an"
                " idempotent producer (enable.idempotence) stores every record once",
            )
        if kind != _GROUP:
            raise RefusedError(ErrorCode.invalid_request, f"key type {kind} has no coordinator")
        if (why := unusable_group_id(key)) is not None:
            raise RefusedError(ErrorCode.invalid_group_id, why)
        broker = await _broker_of(exchange, key)
    except (RefusedError, StreamhouseError) as error:
        return {**refusal_of(exchange, error), "node_id": -1, "host": "", "port": -1}
    return {
        "error_message": None,
        "node_id": broker.node_id,
        "host": broker.address.host,
        "port": broker.address.port,
    }


async def _broker_of(exchange: KafkaExchange, group_id: str) -> BrokerState:
    """Return the coordinator of a group; raises if the coordinator is unavailable."""
    broker = exchange.broker
    if exchange.service.shards is None:
        return broker.own
    shard = await broker.groups.shard_of(group_id)
    for state in await all_brokers(exchange):
        if state.shard == shard:
            return state
    raise RefusedError(
        ErrorCode.coordinator_not_available,
        f"shard '{shard}' coordinates the group, but the shard's Kafka address is unknown",
    )
