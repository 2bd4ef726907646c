"""Every API of Kafka that is answered: versions and handlers.

Versions end before a version with a feature not offered here, for example new group protocols.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from streamhouse.storage_service.kafka.messages.fetch_answer import FETCH_VERSIONS
from streamhouse.storage_service.kafka_door._api import Api
from streamhouse.storage_service.kafka_door._api_versions import API_VERSIONS_KEY, api_versions
from streamhouse.storage_service.kafka_door._exchange import KafkaExchange
from streamhouse.storage_service.kafka_door.fetching._fetch import (
    FetchRequest,
    answer_fetch,
    refuse_fetch,
)
from streamhouse.storage_service.kafka_door.fetching._list_offsets import (
    answer_list_offsets,
    answer_offset_for_leader_epoch,
    refuse_list_offsets,
)
from streamhouse.storage_service.kafka_door.groups._group_apis import GROUP_APIS
from streamhouse.storage_service.kafka_door.producing._produce import PRODUCE_APIS
from streamhouse.storage_service.kafka_door.topics._admin_apis import ADMIN_APIS
from streamhouse.storage_service.kafka_door.topics._metadata import answer_metadata

__all__ = ["APIS"]


async def _answer_api_versions(_: KafkaExchange, __: Any) -> Mapping[str, Any]:
    return api_versions(APIS.values())


_ROWS: Final = (
    Api(
        key=1,
        name="fetch",
        versions=FETCH_VERSIONS,
        answer=answer_fetch,
        refuse=refuse_fetch,
        keep=FetchRequest.of,
        is_read=True,
    ),
    Api(
        key=2,
        name="list_offsets",
        versions=(1, 9),
        answer=answer_list_offsets,
        refuse=refuse_list_offsets,
        is_read=True,
    ),
    Api(
        key=3,
        name="metadata",
        versions=(0, 12),
        answer=answer_metadata,
        is_read=True,
    ),
    Api(
        key=API_VERSIONS_KEY,
        name="api_versions",
        versions=(0, 3),
        answer=_answer_api_versions,
        is_open=True,
    ),
    *GROUP_APIS,
    Api(
        key=23,
        name="offset_for_leader_epoch",
        versions=(2, 4),
        answer=answer_offset_for_leader_epoch,
        is_read=True,
    ),
    *ADMIN_APIS,
    *PRODUCE_APIS,
)

APIS: Final[Mapping[int, Api]] = {api.key: api for api in _ROWS}
"""By API key."""
