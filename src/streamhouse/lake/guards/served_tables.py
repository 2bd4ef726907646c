"""The facts about the service's own tables with which the REST catalog protects their lake tables.

Light on purpose: the server imports this module without loading the Iceberg library.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.offsets import BucketPositions
from streamhouse.core.model.table import TableInfo

__all__ = ["ServedTable", "ServedTables"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTable:
    """A table of the service at one moment; `pinned` are lake snapshot ids."""

    info: TableInfo
    lake: LakeState
    positions: Mapping[int, BucketPositions]
    pinned: Collection[int] = ()

    @property
    def high_watermarks(self) -> dict[int, int]:
        """The end of the log by bucket."""
        return {bucket: at.high_watermark for bucket, at in self.positions.items()}


class ServedTables(Protocol):
    """The service's tables, as they are when asked. Called on worker threads."""

    @property
    def service_id(self) -> str:
        """The id that marks the service's lake tables."""

    def with_id(self, table_id: int) -> ServedTable | None:
        """Return the table with this id, None when there is none (any more)."""

    def named(self, path: str) -> ServedTable | None:
        """Return the table at `database.table`, None without such a table."""
