"""The route by which shards learn each other's Kafka address and topics."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from streamhouse.storage_service.kafka.topics import topic_name_of
from streamhouse.storage_service.server.caller import Level
from streamhouse.storage_service.server.control.control_routes import ControlRoutes
from streamhouse.storage_service.server.http.http_exchange import exchange_of
from streamhouse.storage_service.server.service import Service

__all__ = ["kafka_routes"]


def kafka_routes(routes: ControlRoutes, service: Service) -> None:

    @routes.answers("Where this process serves Kafka clients, and the topics that it has.")
    async def kafka_topics(request: Request) -> dict[str, Any]:
        may = exchange_of(request).caller.may
        host, port = service.kafka_address or (None, None)
        manager = service.manager
        led = [table.info for table in manager.open_tables()]
        # Moving tables have no leader, but exist: otherwise members of a group would assign no
        # partitions.
        moving = [away.info for away in manager.away.values() if away.info is not None]
        return {
            "shard": None if service.shards is None else service.shards.own,
            "host": host,
            "port": port,
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
