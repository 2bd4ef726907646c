"""What serializers ask the schema registry of a service in this process."""

from __future__ import annotations

import json
from typing import Any, Final
from urllib.parse import parse_qsl

from tests.support.in_process_service import InProcessService

__all__ = ["ORDER", "ask", "framed", "register", "with_field"]

_ROOT: Final = "/kafka/registry"
_HEADERS: Final = {"content-type": "application/vnd.schemaregistry.v1+json"}
ORDER: Final = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "note", "type": ["null", "string"], "default": None},
    ],
}


def with_field(name: str, kind: Any, schema: Any = ORDER) -> Any:
    """Return a schema with one more field, or with this field otherwise."""
    kept = [one for one in schema["fields"] if one["name"] != name]
    return {**schema, "fields": [*kept, {"name": name, "type": kind}]}


def framed(schema_id: int, body: bytes) -> bytes:
    """Return Avro in Confluent's framing."""
    return b"\0" + schema_id.to_bytes(4, "big") + body


async def ask(
    service: InProcessService, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any]:
    """Send a request as serializers do; return its status and JSON."""
    sent = b"" if body is None else json.dumps(body).encode()
    path, _, query = path.partition("?")
    answer = await service.call(
        method,
        _ROOT + path,
        query=dict(parse_qsl(query)),
        body=sent,
        headers={**_HEADERS, **headers},
    )
    return answer.status, answer.json()


async def register(
    service: InProcessService, subject: str, schema: Any, **headers: str
) -> tuple[int, Any]:
    """Register a schema."""
    body = {"schema": json.dumps(schema)}
    return await ask(service, "POST", f"/subjects/{subject}/versions", body, **headers)
