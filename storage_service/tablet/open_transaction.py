"""A transaction that is not finished, and how much all of them have staged."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from streamhouse.storage_service.errors import OverloadedError
from streamhouse.storage_service.model.transaction import CommitResult, TransactionStatus
from streamhouse.storage_service.tablet.transaction_commit import CommitProgress
from streamhouse.storage_service.tablet.transaction_files import (
    Decision,
    PartSize,
    TransactionSpec,
)

__all__ = ["OpenTransaction", "StagedBytes", "digest_of", "spec_to_json"]


@dataclass
class StagedBytes:
    """How many bytes are staged in one table, or `within` the whole service."""

    what: str
    limit_name: str
    bytes_max: int
    within: StagedBytes | None = None
    held: int = 0

    def check(self, size: int) -> None:
        """Raise OverloadedError if `size` more bytes are too many."""
        if self.held + size > self.bytes_max:
            raise OverloadedError(
                f"{self.what} has {self.held} bytes staged, of at most {self.bytes_max}"
                f" ({self.limit_name}); commit or abort transactions, or stage less"
            )
        if self.within is not None:
            self.within.check(size)

    def hold(self, size: int) -> None:
        """Count bytes that are staged; negative ones are gone."""
        self.held += size
        if self.within is not None:
            self.within.hold(size)


@dataclass(slots=True, kw_only=True)
class OpenTransaction:
    """What is known of it. Event loop only.

    `named` are the parts that its commit names; `decision` is there when a start found it decided.
    """

    spec: TransactionSpec
    parts: dict[str, PartSize] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    active_us: int
    under_way: int = 0
    """Requests that are storing something for it."""
    named: tuple[str, ...] = ()
    decision: Decision | None = None
    commit: asyncio.Task[CommitResult] | None = None
    progress: CommitProgress = field(default_factory=CommitProgress)

    @property
    def transaction_id(self) -> str:
        """Its id."""
        return self.spec.transaction_id

    @property
    def size_bytes(self) -> int:
        """The bytes of its parts."""
        return sum(part.size_bytes for part in self.parts.values())

    @property
    def expires_us(self) -> int:
        """When it is dropped if nobody touches it."""
        return self.active_us + self.spec.timeout_ms * 1_000

    def has_expired(self, now_us: int) -> bool:
        """Whether nobody has touched it for its timeout."""
        return self.commit is None and not self.under_way and self.expires_us <= now_us

    def to_json(self) -> dict[str, Any]:
        """Return how far it is."""
        status = TransactionStatus.OPEN if self.commit is None else TransactionStatus.COMMITTING
        return {
            **spec_to_json(self.spec),
            "status": str(status),
            "parts": len(self.parts),
            "row_count": sum(part.row_count for part in self.parts.values()),
            "bytes": self.size_bytes,
            "expires_timestamp_us": self.expires_us,
            "rows_to_commit": self.progress.row_count,
            "rows_committed": self.progress.rows_stored,
            "trouble": self.progress.trouble,
        }


def spec_to_json(spec: TransactionSpec) -> dict[str, Any]:
    """Return what a transaction is to do, as its status says it."""
    value = spec.to_json()
    value["begun_timestamp_us"] = value.pop("begun_us")
    return value


def digest_of(parts: Sequence[str]) -> str:
    """Return what tells lists of parts apart."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()
