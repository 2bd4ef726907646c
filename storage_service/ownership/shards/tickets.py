"""The agreement on one table's move between shards: a plain value, in both journals."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from streamhouse.core.errors import InvalidRequestError, StreamhouseError
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.ownership.shards.entries import check_shard_name

__all__ = ["Arrival", "MoveTicket"]

_MOVE_ID: Final = re.compile(r"[0-9a-f]{32}")
_VERSION_MAX: Final = 10**8 - 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveTicket:
    """One attempt to move a table. `version` is the name's version with `source`.

    The next version decides, and only the source creates the next version.
    """

    move_id: str
    path: TablePath
    table_id: int
    source: str
    target: str
    version: int

    def __post_init__(self) -> None:
        check_shard_name(self.source)
        check_shard_name(self.target)
        if (
            not _MOVE_ID.fullmatch(self.move_id)
            or self.source == self.target
            or self.table_id < 1
            or not 1 <= self.version <= _VERSION_MAX
        ):
            raise ValueError(f"no table can be moved like this: {self}")

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "move_id": self.move_id,
            "path": str(self.path),
            "table_id": self.table_id,
            "source": self.source,
            "target": self.target,
            "version": self.version,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> MoveTicket:
        """Read the JSON form; raises `InvalidRequestError`."""
        try:
            return cls(
                move_id=str(value["move_id"]),
                path=TablePath.parse(str(value["path"])),
                table_id=int(value["table_id"]),
                source=str(value["source"]),
                target=str(value["target"]),
                version=int(value["version"]),
            )
        except (KeyError, TypeError, ValueError, StreamhouseError) as error:
            raise InvalidRequestError(f"no move of a table is like this: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Arrival:
    """A table that may come to this shard; with `is_ready` all its files have arrived."""

    ticket: MoveTicket
    is_ready: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {**self.ticket.to_json(), "is_ready": self.is_ready}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Arrival:
        """Read the JSON form; raises `InvalidRequestError`."""
        return cls(MoveTicket.from_json(value), bool(value.get("is_ready", False)))
