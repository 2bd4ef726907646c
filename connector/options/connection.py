"""Names users load: `database.table`, and `database.table$part` for one tier or its metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from streamhouse.storage_service.errors import InvalidNameError, suggestion
from streamhouse.storage_service.model.table import TablePath

__all__ = [
    "BUCKETS",
    "CHANGELOG",
    "FILES",
    "ICEBERG",
    "LAKE",
    "LOG",
    "METADATA_PARTS",
    "SNAPSHOTS",
    "TableName",
]

LAKE: Final = "lake"
LOG: Final = "log"
CHANGELOG: Final = "changelog"
ICEBERG: Final = "iceberg"
SNAPSHOTS: Final = "snapshots"
BUCKETS: Final = "buckets"
FILES: Final = "files"
METADATA_PARTS: Final = (SNAPSHOTS, BUCKETS, FILES)
_PARTS: Final = (LAKE, LOG, CHANGELOG, ICEBERG, *METADATA_PARTS)


@dataclass(frozen=True, slots=True)
class TableName:
    """A table, and which part of it; an empty part is the union of both tiers.

    With part `iceberg` it is the catalog's table of that name, whoever made it.
    """

    path: TablePath
    part: str = ""

    @classmethod
    def parse(cls, text: str) -> TableName:
        """Read `database.table` or `database.table$part`."""
        table, dollar, part = text.strip().partition("$")
        if dollar and part not in _PARTS:
            raise InvalidNameError(
                f"table '{table}' has no part '${part}'{suggestion(part, list(_PARTS))}"
                f" (parts: {', '.join('$' + known for known in _PARTS)})"
            )
        return cls(TablePath.parse(table), part)

    @property
    def is_metadata(self) -> bool:
        """Whether it describes the table instead of holding its rows."""
        return self.part in METADATA_PARTS

    @property
    def is_iceberg(self) -> bool:
        """Whether it is a table of the Iceberg catalog, not the service's."""
        return self.part == ICEBERG

    def __str__(self) -> str:
        return f"{self.path}${self.part}" if self.part else str(self.path)
