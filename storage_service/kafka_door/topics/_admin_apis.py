"""The APIs for authentication and for the administration of topics."""

from __future__ import annotations

from typing import Final

from streamhouse.storage_service.kafka_door._api import Api
from streamhouse.storage_service.kafka_door._sasl import (
    answer_sasl_authenticate,
    answer_sasl_handshake,
)
from streamhouse.storage_service.kafka_door.topics._cluster import (
    answer_describe_cluster,
    answer_find_coordinator,
)
from streamhouse.storage_service.kafka_door.topics._configs import (
    answer_alter_configs,
    answer_describe_configs,
    answer_incremental_alter_configs,
)
from streamhouse.storage_service.kafka_door.topics._new_topics import (
    answer_create_partitions,
    answer_create_topics,
    answer_delete_topics,
)

__all__ = ["ADMIN_APIS"]

ADMIN_APIS: Final = (
    Api(
        key=10,
        name="find_coordinator",
        versions=(0, 4),
        answer=answer_find_coordinator,
    ),
    # After version 0 of the handshake come bytes that are not a request.
    Api(
        key=17,
        name="sasl_handshake",
        versions=(1, 1),
        answer=answer_sasl_handshake,
        is_open=True,
    ),
    Api(key=19, name="create_topics", versions=(2, 7), answer=answer_create_topics),
    Api(key=20, name="delete_topics", versions=(1, 6), answer=answer_delete_topics),
    Api(
        key=32,
        name="describe_configs",
        versions=(1, 4),
        answer=answer_describe_configs,
        is_read=True,
    ),
    Api(key=33, name="alter_configs", versions=(0, 2), answer=answer_alter_configs),
    Api(
        key=36,
        name="sasl_authenticate",
        versions=(0, 2),
        answer=answer_sasl_authenticate,
        is_open=True,
    ),
    Api(key=37, name="create_partitions", versions=(0, 3), answer=answer_create_partitions),
    Api(
        key=44,
        name="incremental_alter_configs",
        versions=(0, 1),
        answer=answer_incremental_alter_configs,
    ),
    Api(key=60, name="describe_cluster", versions=(0, 1), answer=answer_describe_cluster),
)
