"""The progress of each stream from a database: a row of a table beside the stream's target tables.

The row follows the tables: a position is written once the tables have all changes below the
position. Before the end of the first snapshot, the row has only the snapshot's generation.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from streamhouse.client import StorageClient
from streamhouse.core.errors import (
    NotFoundError,
    TableExistsError,
)

__all__ = ["FollowedTable", "Progress", "ProgressTable"]

TABLE: Final = "streamhouse_cdc"
_SCHEMA: Final = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("generation", pa.string()),
        pa.field("system_id", pa.string()),
        pa.field("lsn", pa.int64()),
        pa.field("tables", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class FollowedTable:
    """The target table of a source table: its path, and the source's numbers for the table and its
    columns.

    The source numbers its tables and the columns of each. A dropped and recreated table has the
    same name and another number; a renamed column keeps its number.
    """

    path: str
    oid: int
    columns: Mapping[str, int] = field(default_factory=dict)

    def renamed_column(self, now: Mapping[str, int]) -> tuple[str, str] | None:
        """Return the old and the new name of a column with another name in `now`."""
        names = {number: name for name, number in now.items()}
        for name, number in self.columns.items():
            if names.get(number, name) != name:
                return name, names[number]
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a stream is.

    `generation` names one snapshot and what followed it; tables tell repeated changes by it.
    `lsn` is the position in the source's log up to which all tables have everything; None until
    the snapshot is whole. `tables` maps the name of each table of the source to ours.
    """

    name: str
    generation: str
    system_id: str
    lsn: int | None
    tables: dict[str, FollowedTable]

    @property
    def app_id(self) -> str:
        """What names the stream's transactions."""
        return f"cdc:{self.name}:{self.generation}"


class ProgressTable:
    """The positions of the streams into one database."""

    def __init__(self, client: StorageClient, database: str) -> None:
        self._client = client
        self._path = f"{database}.{TABLE}"

    def load(self, name: str) -> Progress | None:
        """Return the progress of the stream, or None for a new stream."""
        try:
            row = self._client.lookup_one(self._path, name=name)
        except NotFoundError:
            return None
        if row is None:
            return None
        return Progress(
            name=name,
            generation=str(row["generation"]),
            system_id=str(row["system_id"]),
            lsn=row["lsn"],
            tables={
                source: FollowedTable(path, oid, columns)
                for source, (path, oid, columns) in json.loads(row["tables"]).items()
            },
        )

    def store(self, progress: Progress) -> None:
        """Write where the stream is, durably."""
        row = {
            "name": progress.name,
            "generation": progress.generation,
            "system_id": progress.system_id,
            "lsn": progress.lsn,
            "tables": json.dumps(
                {
                    source: (ours.path, ours.oid, dict(ours.columns))
                    for source, ours in progress.tables.items()
                }
            ),
        }
        self._client.upsert(self._path, pa.Table.from_pylist([row], schema=_SCHEMA))

    def create(self) -> None:
        """Make the table where there is none."""
        with contextlib.suppress(TableExistsError):
            self._client.create_table(self._path, _SCHEMA, primary_key=["name"])

    def forget(self, name: str) -> None:
        """Forget a stream; nothing happens where there is none."""
        with contextlib.suppress(NotFoundError):
            self._client.delete(self._path, pa.table({"name": [name]}))
