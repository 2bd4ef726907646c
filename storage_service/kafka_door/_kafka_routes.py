"""The route by which shards learn each other's Kafka address and topics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fastapi import Request

from streamhouse.storage_service.kafka.topics import topic_name_of
from streamhouse.storage_service.kafka_door.broker._broker_state import BrokerAddress
from streamhouse.storage_service.server.caller import Level
from streamhouse.storage_service.server.control.control_routes import ControlRoutes
from streamhouse.storage_service.server.http.http_exchange import exchange_of
from streamhouse.storage_service.server.routes import ANY_TOKEN, control, unrouted
from streamhouse.storage_service.server.service import Service

__all__ = ["KAFKA_ROUTES", "kafka_routes"]

_PATH: Final = "/v1/kafka/topics"
KAFKA_ROUTES: Final = (
    *control("service", "", ("GET", _PATH, ANY_TOKEN, "kafka_topics"), about=True),
    *unrouted(_PATH, ANY_TOKEN, about=True),
)


def kafka_routes(
    routes: ControlRoutes, service: Service, *, address: Callable[[], BrokerAddress | None]
) -> None:
    """Bind the function of the route; `address` is where this process serves clients now."""

    @routes.answers("Where this process serves Kafka clients, and the topics that it has.")
    async def kafka_topics(request: Request) -> dict[str, Any]:
        may = exchange_of(request).caller.may
        own = address()
        manager = service.manager
        led = [table.info for table in manager.open_tables()]
        # Moving tables have no leader, but exist: otherwise members of a group would assign no
        # partitions.
        moving = [away.info for away in manager.away.values() if away.info is not None]
        return {
            "shard": None if service.shards is None else service.shards.own,
            "host": None if own is None else own.host,
            "port": None if own is None else own.port,
            "topics": [
                {
                    "topic": topic_name_of(info.path, info.descriptor.properties),
                    "table": str(info.path),
                    "table_id": info.table_id,
                    "bucket_count": info.bucket_count,
                    "created_at_us": info.created_at_us,
                    "is_led": is_led,
                }
                for infos, is_led in ((led, True), (moving, False))
                for info in infos
                if may(Level.READ, str(info.path))
            ],
        }
