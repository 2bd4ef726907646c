"""The shard directory's entries for tables' names: plain values, and their sealed objects.

An object has its own key and a checksum; an object under another key, or with other bytes than
written, is a `CorruptDataError`.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from crc32c import crc32c

from streamhouse.core.errors import CorruptDataError, InvalidNameError

__all__ = ["Folder", "NameEntry", "NameState", "check_shard_name", "seal", "unseal"]

_SHARD: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_MEMBERS: Final = {"content", "key", "nonce"}


def check_shard_name(name: str) -> None:
    """Raise `InvalidNameError` unless `name` may name a shard."""
    if not _SHARD.fullmatch(name):
        raise InvalidNameError(
            f"shard name '{name[:80]}' is not valid: use 1 to 63 small letters, digits, '-' and"
            " '_', beginning with a letter or digit"
        )


class Folder(enum.StrEnum):
    """The folders below the shard directory's prefix; `SERVICE` is one object."""

    SERVICE = "service"
    IDS = "ids"
    TABLES = "tables"
    DATABASES = "databases"
    SHARDS = "shards"
    HELD = "held"


class NameState(enum.StrEnum):
    """The state of a name; see decision 0021."""

    FREE = "free"
    ASSIGNED = "assigned"
    HELD = "held"


@dataclass(frozen=True, slots=True, kw_only=True)
class NameEntry:
    """One version of a name. A free name has no shard, and only a held name has an id."""

    state: NameState
    shard: str = ""
    table_id: int = 0

    def __post_init__(self) -> None:
        if self.state is not NameState.FREE:
            check_shard_name(self.shard)
        is_right = bool(self.shard) == (self.state is not NameState.FREE)
        is_right &= (self.table_id > 0) == (self.state is NameState.HELD)
        if not is_right:
            raise ValueError(f"no name can be {self}")

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"state": str(self.state), "shard": self.shard, "table_id": self.table_id}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, where: str) -> NameEntry:
        """Read the JSON form; `where` names the object in a `CorruptDataError`."""
        try:
            return cls(
                state=NameState(value["state"]),
                shard=str(value["shard"]),
                table_id=int(value["table_id"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError, InvalidNameError) as error:
            raise CorruptDataError(
                f"{where} is no valid entry of a table's name: {error!r}"
            ) from error


FREE: Final = NameEntry(state=NameState.FREE)
"""A name without a table, after a drop."""


def seal(key: str, content: Mapping[str, Any], *, nonce: str) -> bytes:
    """Return the bytes of an object of the shard directory; `nonce` identifies the writer."""
    body = {"content": content, "key": key, "nonce": nonce}
    return json.dumps({**body, "crc32c": _checksum(body)}, sort_keys=True).encode()


def unseal(key: str, data: bytes) -> dict[str, Any]:
    """Return the content of the object under `key`; raises `CorruptDataError`."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{key} in the store is unreadable: {error}") from error
    checksum = value.pop("crc32c", None) if isinstance(value, dict) else None
    if checksum is None or set(value) != _MEMBERS or checksum != _checksum(value):
        raise CorruptDataError(f"{key} in the store is damaged: its checksum is wrong")
    if value["key"] != key:
        raise CorruptDataError(f"{key} in the store was made under another name: {value['key']!r}")
    content = value["content"]
    if not isinstance(content, dict):
        raise CorruptDataError(f"{key} in the store holds no JSON object")
    return content


def _checksum(body: Mapping[str, Any]) -> str:
    return f"{crc32c(json.dumps(body, sort_keys=True).encode()):08x}"
