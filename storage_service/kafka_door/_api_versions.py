"""ApiVersions: the offered APIs and versions. Clients send this request first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from streamhouse.storage_service.kafka.messages.answers import answer_entity, entity_bytes
from streamhouse.storage_service.kafka_door._api import Api

__all__ = ["API_VERSIONS_KEY", "api_versions", "versions_refused"]

API_VERSIONS_KEY: Final = 18


def api_versions(apis: Iterable[Api]) -> Mapping[str, Any]:
    """Return the answer that lists `apis`."""
    return {
        "api_keys": [
            {"api_key": api.key, "min_version": api.listed_from, "max_version": api.versions[1]}
            for api in sorted(apis, key=lambda api: api.key)
        ]
    }


def versions_refused(apis: Iterable[Api]) -> bytes:
    """Return the body for a client with an unsupported version of ApiVersions.

    The body has version 0, which every client can read, and lists all APIs: the client asks again.
    """
    values = {**api_versions(apis), "error_code": ErrorCode.unsupported_version}
    return entity_bytes(answer_entity(API_VERSIONS_KEY, 0, values))
