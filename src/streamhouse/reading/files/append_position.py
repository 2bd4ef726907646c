"""The position of a read of an Iceberg table's appends, as JSON in Spark's checkpoint.

The JSON is `{"version": 1, "table_uuid": "...", "snapshot_id": "42", "sequence": 7, "rows_of":
"snapshot", "files_read": 3, "files": 10}`: the read began with the rows of snapshot 42, and has
read three of ten files. `"rows_of": "append"` means the files added by the snapshot, after
everything before the snapshot. Without a snapshot (null) the table was empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from streamhouse.core.errors import InvalidRequestError, TableNotFoundError

__all__ = ["AppendPosition"]

_VERSION: Final = 1
_SNAPSHOT: Final = "snapshot"
_APPEND: Final = "append"


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendPosition:
    """The first `files_read` of a snapshot's `file_count` files were read, in their fixed order.

    With `is_initial` the files are all files of the snapshot, else the files added by the snapshot.
    `sequence` is the snapshot's sequence number, which finds the next snapshot when this one is
    gone.
    """

    table_uuid: str
    snapshot_id: int | None
    sequence: int
    is_initial: bool
    files_read: int = 0
    file_count: int = 0

    @property
    def is_done(self) -> bool:
        """Whether everything up to this snapshot was read."""
        return self.files_read == self.file_count

    def at(self, files_read: int) -> AppendPosition:
        """Return the position in the same snapshot after `files_read` files."""
        return replace(self, files_read=files_read)

    def to_json(self) -> dict[str, Any]:
        """Return the form Spark keeps; a snapshot id is a string because it exceeds 2**53."""
        return {
            "version": _VERSION,
            "table_uuid": self.table_uuid,
            "snapshot_id": None if self.snapshot_id is None else str(self.snapshot_id),
            "sequence": self.sequence,
            "rows_of": _SNAPSHOT if self.is_initial else _APPEND,
            "files_read": self.files_read,
            "files": self.file_count,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, table: str, table_uuid: str) -> AppendPosition:
        """Read the result of `to_json`.

        Raises `InvalidRequestError` for anything else, `TableNotFoundError` for a position of
        another table with the same name.
        """
        version = value.get("version")
        if type(version) is int and version > _VERSION:
            raise InvalidRequestError(
                f"table '{table}': the position in the checkpoint has version {version}, but this"
                f" Streamhouse reads {_VERSION}; go on with the release that wrote it"
            )
        try:
            if value["version"] != _VERSION or value["rows_of"] not in (_SNAPSHOT, _APPEND):
                raise ValueError(value)
            snapshot_id = value["snapshot_id"]
            position = cls(
                table_uuid=str(value["table_uuid"]),
                snapshot_id=None if snapshot_id is None else int(snapshot_id),
                sequence=int(value["sequence"]),
                is_initial=value["rows_of"] == _SNAPSHOT,
                files_read=int(value["files_read"]),
                file_count=int(value["files"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"table '{table}': {value!r} in the checkpoint is not a position in an Iceberg"
                " table"
            ) from error
        if position.table_uuid != table_uuid:
            raise TableNotFoundError(
                f"table '{table}' was dropped and created again since the stream's checkpoint was"
                f" made (uuid {position.table_uuid}, now {table_uuid}); start with a new checkpoint"
            )
        return position
