"""What one shard tells the others for Kafka clients: where its door is, and which topics it has."""

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
        return {
            "shard": None if service.shards is None else service.shards.own,
            "host": host,
            "port": port,
            "topics": [
                {
                    "topic": topic_name_of(table.path, table.info.descriptor.properties),
                    "table": str(table.path),
                    "table_id": table.info.table_id,
                    "bucket_count": table.info.bucket_count,
                    "created_at_us": table.info.created_at_us,
                }
                for table in service.manager.open_tables()
                if may(Level.READ, str(table.path))
            ],
        }
