"""A table that cannot be served: the files are damaged, or the disk fails to return data.

Invariant: no file of the table is changed, moved or removed; only a drop with `damaged` gives the
table up. Every call with the table's name gets one error with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamhouse.core.errors import StreamhouseError, TableDamagedError
from streamhouse.core.model.table import TablePath

__all__ = ["DamagedTable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedTable:
    """The table, the reason, and the `code` of the original error."""

    path: TablePath
    table_id: int
    code: str
    reason: str

    @classmethod
    def of(cls, path: TablePath, table_id: int, error: Exception) -> DamagedTable:
        """Return the damaged table for the `error` of its opening."""
        if isinstance(error, StreamhouseError):
            reason = error.message.removeprefix(f"table '{path}' cannot be opened: ")
            return cls(path=path, table_id=table_id, code=error.code, reason=reason)
        reason = f"opening it failed with {type(error).__name__}: {error}"
        return cls(path=path, table_id=table_id, code=TableDamagedError.code, reason=reason)

    def to_json(self) -> dict[str, str]:
        """Return the entry in the status."""
        return {"table": str(self.path), "code": self.code, "reason": self.reason}

    def error(self) -> TableDamagedError:
        """Return the error for every call with the table's name."""
        return TableDamagedError(
            f"table '{self.path}' is unavailable: {self.reason}; nothing of it was changed, the"
            " other tables are served, and docs/operations.md says how to get it back"
        )
