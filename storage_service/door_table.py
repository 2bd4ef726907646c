"""The table of doors: which protocols a service with a configuration speaks.

The room of a door is imported only if the configuration asks for the door.
"""

from __future__ import annotations

from streamhouse.core.extras import require
from streamhouse.storage_service.catalog_door.catalog_door import CatalogDoor
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.server.doors import ClosedDoor, Door, Doors

__all__ = ["doors_of"]


def doors_of(config: ServiceConfig) -> Doors:
    """Return the doors of a service; raises as `require` for missing libraries."""
    return Doors([CatalogDoor(config), *_kafka_doors(config)])


def _kafka_doors(config: ServiceConfig) -> list[Door]:
    if config.kafka_port is None:
        why = "Kafka clients and the schema registry are served with --kafka-port"
        return [ClosedDoor("/kafka", why), ClosedDoor("/v1/kafka", why)]
    require("kafka", "--kafka-port")
    from streamhouse.storage_service.kafka_door.door import KafkaDoor  # noqa: PLC0415 - Kafka is an extra
    from streamhouse.storage_service.kafka_door.registry.registry_door import RegistryDoor  # noqa: PLC0415 - Kafka is an extra

    return [KafkaDoor(config), RegistryDoor()]
