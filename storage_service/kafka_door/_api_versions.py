"""ApiVersions: which APIs there are, in which versions. Clients ask for it first of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from streamhouse.storage_service.kafka.messages.answers import answer_entity, entity_bytes
from streamhouse.storage_service.kafka_door._api import Api

__all__ = ["API_VERSIONS_KEY", "api_versions", "versions_refused"]

API_VERSIONS_KEY: Final = 18


def api_versions(apis: Iterable[Api]) -> Mapping[str, Any]:
    """Return the answer that lists these."""
    return {
        "api_keys": [
            {"api_key": api.key, "min_version": api.told_from, "max_version": api.versions[1]}
            for api in sorted(apis, key=lambda api: api.key)
        ]
    }


def versions_refused(apis: Iterable[Api]) -> bytes:
    """Return the body for a client whose version of ApiVersions is not known here.

    It is one of version 0, which every client can read, and lists all: the client asks again.
    """
    values = {**api_versions(apis), "error_code": ErrorCode.unsupported_version}
    return entity_bytes(answer_entity(API_VERSIONS_KEY, 0, values))
