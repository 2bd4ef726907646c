"""Transactions as callers see them: what one does, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from streamhouse.core.model.offsets import ranges_in

__all__ = [
    "CommitResult",
    "Isolation",
    "LinkedCommit",
    "ReadPosition",
    "TransactionOperation",
    "TransactionStatus",
]


class TransactionOperation(StrEnum):
    """What the rows of a transaction do: appends to log tables, the others by primary key.

    `overwrite` makes the table what its rows make of an empty one.
    """

    APPEND = "append"
    UPSERT = "upsert"
    DELETE = "delete"
    OVERWRITE = "overwrite"


class TransactionStatus(StrEnum):
    """How far a transaction is.

    `committing` is decided: it happens, whatever breaks. `skipped` wrote nothing, because its
    application has committed that version, or a later one, before. `refused` is `aborted` by a
    commit that failed.
    """

    OPEN = "open"
    COMMITTING = "committing"
    COMMITTED = "committed"
    SKIPPED = "skipped"
    ABORTED = "aborted"
    REFUSED = "refused"


class Isolation(StrEnum):
    """What must not have changed since a transaction's rows were read.

    `snapshot`: the rows with the keys that it writes. `serializable`: any row of the table.
    """

    SNAPSHOT = "snapshot"
    SERIALIZABLE = "serializable"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPosition:
    """What the rows of a transaction were computed from: the table as it was at `offsets`.

    They have the high watermark of every bucket, taken before the rows were read: a commit happens
    only if nobody has changed since then what `isolation` protects. Of a log table, and by an
    overwrite, every row is protected. `table_id` is the table's that was read: one that was created
    again has changed.
    """

    offsets: Mapping[int, int]
    table_id: int | None = None
    isolation: Isolation = Isolation.SNAPSHOT

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "read_offsets": {str(b): offset for b, offset in sorted(self.offsets.items())},
            "table_id": self.table_id,
            "isolation": str(self.isolation),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedCommit:
    """Parts of a transaction of another table that are committed with this one, or not at all.

    Both tables are served by one process. The other's rows are visible first, by a moment.
    """

    table: str
    transaction_id: str
    parts: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "table": self.table,
            "transaction_id": self.transaction_id,
            "parts": list(self.parts),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LinkedCommit:
        """Read the JSON form."""
        return cls(
            table=value["table"],
            transaction_id=value["transaction_id"],
            parts=tuple(value["parts"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitResult:
    """What a commit did; the same however often it is asked for.

    `ranges` are bucket -> (start, end) in the log, of a primary key table in its changelog.
    `row_count` counts the rows given, and `timestamp_us` is when the last of them was stored.
    """

    status: TransactionStatus
    ranges: Mapping[int, tuple[int, int]]
    row_count: int
    timestamp_us: int

    @property
    def is_skipped(self) -> bool:
        """Whether nothing was written, because it was before."""
        return self.status is TransactionStatus.SKIPPED

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "status": str(self.status),
            "buckets": {str(b): list(span) for b, span in sorted(self.ranges.items())},
            "row_count": self.row_count,
            "timestamp_us": self.timestamp_us,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CommitResult:
        """Read the JSON form, or an answer with it, which says its table."""
        return cls(
            status=TransactionStatus(value["status"]),
            ranges=ranges_in(value.get("table_id"), value["buckets"]),
            row_count=int(value["row_count"]),
            timestamp_us=int(value["timestamp_us"]),
        )
