"""Transactions as seen by callers: operation, status and result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """The operation of a transaction: append to a log table, or a change by primary key.

    `overwrite` replaces the content of the table by the transaction's rows.
    """

    APPEND = "append"
    UPSERT = "upsert"
    DELETE = "delete"
    OVERWRITE = "overwrite"


class TransactionStatus(StrEnum):
    """The progress of a transaction.

    `committing` is decided: the commit happens after any failure. `skipped` wrote nothing, because
    the application had committed the same or a later version before. `refused` is an abort by a
    failed commit.
    """

    OPEN = "open"
    COMMITTING = "committing"
    COMMITTED = "committed"
    SKIPPED = "skipped"
    ABORTED = "aborted"
    REFUSED = "refused"


class Isolation(StrEnum):
    """The rows which must not change between a transaction's read and its commit.

    `snapshot`: the rows with the written keys. `serializable`: any row of the table.
    """

    SNAPSHOT = "snapshot"
    SERIALIZABLE = "serializable"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPosition:
    """The state of the table from which a transaction's rows were computed.

    `offsets` has the high watermark of every bucket, taken before the read. A commit succeeds only
    if the rows protected by `isolation` have not changed since. In a log table, and for an
    overwrite, every row is protected. `table_id` is the id of the table at the read: a table
    created again counts as changed.
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
    """Parts of another table's transaction, committed together with this transaction or not at all.

    One process serves both tables. The rows of the linked table are visible a moment earlier.
    `broken` counts the rejected rows by constraint, for metrics alone: nothing stores the counts.
    """

    table: str
    transaction_id: str
    parts: tuple[str, ...]
    broken: Mapping[str, int] = field(default_factory=dict, compare=False)

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
    """The result of a commit, the same for every repetition.

    `ranges` are bucket -> (start, end) in the log, or in the changelog of a primary key table.
    `row_count` counts the rows of the transaction; `timestamp_us` is the time of the last stored
    row.
    """

    status: TransactionStatus
    ranges: Mapping[int, tuple[int, int]]
    row_count: int
    timestamp_us: int

    @property
    def is_skipped(self) -> bool:
        """Whether the commit wrote nothing because of an earlier commit."""
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
        """Read the JSON form, or a response with the JSON form and a table id."""
        return cls(
            status=TransactionStatus(value["status"]),
            ranges=ranges_in(value.get("table_id"), value["buckets"]),
            row_count=int(value["row_count"]),
            timestamp_us=int(value["timestamp_us"]),
        )
