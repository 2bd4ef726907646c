"""A table that cannot be served: its files are damaged, or the disk does not give them.

Invariant: nothing of it is changed, moved or removed; only who drops it by name as a damaged table
gives it up. Every call that names it is answered with the one error that says why.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamhouse.core.errors import StreamhouseError, TableDamagedError
from streamhouse.core.model.table import TablePath

__all__ = ["DamagedTable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedTable:
    """Which table, and why; `code` is that of the error that was met."""

    path: TablePath
    table_id: int
    code: str
    reason: str

    @classmethod
    def of(cls, path: TablePath, table_id: int, error: Exception) -> DamagedTable:
        """Return the table that cannot be served because of `error`."""
        if isinstance(error, StreamhouseError):
            reason = error.message.removeprefix(f"table '{path}' cannot be opened: ")
            return cls(path=path, table_id=table_id, code=error.code, reason=reason)
        reason = f"opening it failed with {type(error).__name__}: {error}"
        return cls(path=path, table_id=table_id, code=TableDamagedError.code, reason=reason)

    def to_json(self) -> dict[str, str]:
        """Return what the status says of it."""
        return {"table": str(self.path), "code": self.code, "reason": self.reason}

    def error(self) -> TableDamagedError:
        """Return what every call that names the table is answered."""
        return TableDamagedError(
            f"table '{self.path}' is unavailable: {self.reason}; nothing of it was changed, the"
            " other tables are served, and docs/operations.md says how to get it back"
        )
