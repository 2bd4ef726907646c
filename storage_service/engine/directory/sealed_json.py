"""JSON that says what it is and has a checksum: every state file of a data directory.

    {"crc32c": "0a1b2c3d",
    "content": {...},
    "format": 2,
    "kind": "lake",
    "service_id": "...",
    "table_id": 7}

Invariants:
- what `unseal` returns is what was sealed, of this kind, this service and this table; anything else
  is a CorruptDataError that says what is wrong
- the checksum is over the other members in one form: white space is all that may change unnoticed
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from crc32c import crc32c

from streamhouse.storage_service.errors import CorruptDataError

__all__ = ["FORMAT_VERSION", "StateIdentity", "seal", "unseal"]

FORMAT_VERSION: Final = 2
"""Files of format 1 had neither checksum nor identity; the first start seals them."""

_MEMBERS: Final = {"content", "format", "kind", "service_id", "table_id"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateIdentity:
    """What a state file is about; `table_id` is None for what concerns all tables."""

    kind: str
    service_id: str
    table_id: int | None = None


def seal(identity: StateIdentity, content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a state file."""
    text = _canonical(
        {
            "content": content,
            "format": FORMAT_VERSION,
            "kind": identity.kind,
            "service_id": identity.service_id,
            "table_id": identity.table_id,
        }
    )
    return f'{{"crc32c": "{_checksum(text)}",\n{text[1:]}\n'.encode()


def unseal(
    data: bytes, identity: StateIdentity, *, where: str, is_former: bool = False
) -> dict[str, Any]:
    """Return the content of a state file; `where` names it in errors.

    With `is_former` it may be one of format 1, which is its content and nothing else. An empty
    `service_id` stands for any: that is asked of the file from which the service learns its own.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{where} is unreadable: {error}") from error
    if not isinstance(value, dict):
        raise CorruptDataError(f"{where} holds no JSON object")
    if is_former and "content" not in value and "crc32c" not in value:
        return value
    checksum = value.pop("crc32c", None)
    if set(value) != _MEMBERS or checksum is None:
        raise CorruptDataError(f"{where} is damaged: it is no state file with a checksum")
    if checksum != _checksum(_canonical(value)):
        raise CorruptDataError(f"{where} is damaged: its checksum is wrong")
    if value["format"] != FORMAT_VERSION:
        raise CorruptDataError(
            f"{where} has format {value['format']}, which this release cannot read: it is of"
            " another version of Streamhouse"
        )
    found = (value["kind"], value["service_id"], value["table_id"])
    wanted = (identity.kind, identity.service_id or value["service_id"], identity.table_id)
    for name, is_, should in zip(("kind", "service", "table"), found, wanted, strict=True):
        if is_ != should:
            raise CorruptDataError(f"{where} is of another {name}: {is_!r}, not {should!r}")
    content = value["content"]
    if not isinstance(content, dict):
        raise CorruptDataError(f"{where} holds no JSON object")
    return content


def _canonical(value: Mapping[str, Any]) -> str:
    # One line a member: people read these files, too.
    return json.dumps(value, sort_keys=True, separators=(",\n", ": "))


def _checksum(text: str) -> str:
    return f"{crc32c(text.encode()):08x}"
