"""The facts about the service's own tables with which the REST catalog protects their lake tables.

Light on purpose: the server imports this module without loading the Iceberg library.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.table import TableInfo

__all__ = ["LiveTable", "LiveTables"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTable:
    """A table of the service at one moment; `pinned` are lake snapshot ids."""

    info: TableInfo
    lake: LakeState
    high_watermarks: Mapping[int, int]
    pinned: Collection[int] = ()


class LiveTables(Protocol):
    """The service's tables, as they are when asked. Called on worker threads."""

    @property
    def service_id(self) -> str:
        """The id that marks the service's lake tables."""

    def with_id(self, table_id: int) -> LiveTable | None:
        """Return the table with this id, None when there is none (any more)."""

    def named(self, path: str) -> LiveTable | None:
        """Return the table at `database.table`, None without such a table."""
