"""An unfinished transaction, and the bytes staged by all unfinished transactions."""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from streamhouse.core.errors import (
    InvalidRequestError,
    OverloadedError,
    RequestTooLargeError,
)
from streamhouse.core.model.transaction import (
    CommitResult,
    LinkedCommit,
    ReadPosition,
    TransactionOperation,
    TransactionStatus,
)
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.engine.transactions._transaction_commit import CommitProgress
from streamhouse.storage_service.engine.transactions._transaction_outcomes import (
    TransactionOutcomes,
)
from streamhouse.storage_service.engine.transactions.transaction_files import (
    Decision,
    PartSize,
    TransactionSpec,
)

__all__ = [
    "OpenTransaction",
    "StagedBytes",
    "check_count",
    "check_operation",
    "check_part_count",
    "check_parts",
    "check_spec",
    "digest_of",
    "find_joinable",
    "listed",
    "spec_to_json",
]

_REASON_LENGTH_MAX: Final = 1_000


@dataclass
class StagedBytes:
    """The bytes staged in one table, or `within` the whole service."""

    what: str
    limit_name: str
    bytes_max: int
    within: StagedBytes | None = None
    held: int = 0

    def check(self, size: int) -> None:
        """Raise OverloadedError if `size` further bytes are too many."""
        if self.held + size > self.bytes_max:
            raise OverloadedError(
                f"{self.what} has {self.held} bytes staged, of at most {self.bytes_max}"
                f" ({self.limit_name}); commit or abort transactions, or stage less"
            )
        if self.within is not None:
            self.within.check(size)

    def hold(self, size: int) -> None:
        """Count staged bytes; a negative number releases bytes."""
        self.held += size
        if self.within is not None:
            self.within.hold(size)


@dataclass(slots=True, kw_only=True)
class OpenTransaction:
    """The state of a transaction. Event loop only.

    `named` are the parts of the commit; `decision` is present if a start of the service found the
    transaction decided.
    """

    spec: TransactionSpec
    parts: dict[str, PartSize] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    active_us: int
    under_way: int = 0
    """Requests that are storing something for it."""
    beginning: asyncio.Future[None] | None = None
    """Until it is done, a crash may forget the transaction."""
    named: tuple[str, ...] = ()
    read: ReadPosition | None = None
    """What must not have changed when it is decided; its commit says so."""
    truncations_known: int = 0
    """How often the table had been overwritten when it began."""
    linked: LinkedCommit | None = None
    """What its commit commits of another table."""
    held: int = 0
    """Commits of other tables that are going to commit it: it is neither aborted nor expires."""
    decision: Decision | None = None
    commit: asyncio.Task[CommitResult] | None = None
    progress: CommitProgress = field(default_factory=CommitProgress)

    @property
    def transaction_id(self) -> str:
        """The id."""
        return self.spec.transaction_id

    @property
    def size_bytes(self) -> int:
        """The bytes of all parts."""
        return sum(part.size_bytes for part in self.parts.values())

    @property
    def row_count(self) -> int:
        """The rows of all parts."""
        return sum(part.row_count for part in self.parts.values())

    @property
    def status(self) -> TransactionStatus:
        """Whether the transaction accepts rows or is being committed."""
        return TransactionStatus.OPEN if self.commit is None else TransactionStatus.COMMITTING

    @property
    def expires_us(self) -> int:
        """The time of the drop, unless a call touches the transaction earlier."""
        return self.active_us + self.spec.timeout_ms * 1_000

    def has_expired(self, now_us: int) -> bool:
        """Whether no call has touched the transaction within its timeout."""
        is_used = self.commit is not None or self.under_way or self.held
        return not is_used and self.expires_us <= now_us

    def to_json(self) -> dict[str, Any]:
        """Return the present state."""
        return {
            **spec_to_json(self.spec),
            "status": str(self.status),
            "parts": len(self.parts),
            "row_count": self.row_count,
            "bytes": self.size_bytes,
            "expires_timestamp_us": self.expires_us,
            "rows_to_commit": self.progress.row_count,
            "rows_committed": self.progress.rows_stored,
            "trouble": self.progress.trouble,
        }


def check_spec(spec: TransactionSpec, config: ServiceConfig, *, table: str, join: bool) -> None:
    """Raise `InvalidRequestError` for a specification that cannot begin."""
    if not 0 < spec.timeout_ms <= config.transaction_timeout_ms_max:
        raise InvalidRequestError(
            f"timeout_ms = {spec.timeout_ms} of a transaction must be in"
            f" 1..{config.transaction_timeout_ms_max} (transaction_timeout_ms_max)"
        )
    if (spec.app_id is None) != (spec.version is None):
        raise InvalidRequestError(
            f"a transaction of '{table}' has an app_id and a version, or neither"
        )
    if join and spec.app_id is None:
        raise InvalidRequestError(f"a transaction of '{table}' is joined by its app_id and version")


def check_count(transactions: Collection[str], config: ServiceConfig, *, table: str) -> None:
    """Raise `OverloadedError` if a further open transaction is too many."""
    if len(transactions) >= config.transactions_open_max:
        raise OverloadedError(
            f"table '{table}' has its limit of {config.transactions_open_max} open transactions"
            " (transactions_open_max); commit or abort some, or wait until they time out"
        )


def check_operation(spec: TransactionSpec, operation: TransactionOperation, *, table: str) -> None:
    """Raise `InvalidRequestError` if the transaction of a chosen id has another specification."""
    if spec.operation is not operation:
        raise InvalidRequestError(
            f"transaction {spec.transaction_id} of '{table}' is there, and is to"
            f" {spec.operation}; choose another id to {operation}"
        )


def check_part_count(transaction: OpenTransaction, config: ServiceConfig, *, table: str) -> None:
    """Raise `RequestTooLargeError` if a further part is too many."""
    if len(transaction.parts) >= config.transaction_parts_max:
        raise RequestTooLargeError(
            f"transaction {transaction.transaction_id} of '{table}' has its limit of"
            f" {config.transaction_parts_max} parts (transaction_parts_max); stage larger ones"
        )


def check_parts(transaction: OpenTransaction, parts: Sequence[str], *, table: str) -> None:
    """Raise `InvalidRequestError` unless a commit names existing parts, each once."""
    where = f"transaction {transaction.transaction_id} of '{table}'"
    if len(set(parts)) < len(parts):
        raise InvalidRequestError(f"{where}: a part is named twice")
    for part in parts:
        if part not in transaction.parts:
            raise InvalidRequestError(
                f"{where} has no part '{part[:40]}'; name what staging answered"
            )


def find_joinable(
    transactions: Iterable[OpenTransaction], wanted: TransactionSpec
) -> OpenTransaction | None:
    """Return the newest open transaction with the specification `wanted`."""
    same = [
        transaction
        for transaction in transactions
        if transaction.commit is None
        and transaction.decision is None
        and transaction.spec.app_id == wanted.app_id
        and transaction.spec.version == wanted.version
        and transaction.spec.operation is wanted.operation
        and transaction.spec.columns == wanted.columns
        and transaction.spec.source == wanted.source
    ]
    return max(same, key=lambda transaction: transaction.spec.begun_us, default=None)


def spec_to_json(spec: TransactionSpec) -> dict[str, Any]:
    """Return the specification of a transaction for its status."""
    value = spec.to_json()
    value["begun_timestamp_us"] = value.pop("begun_us")
    return value


def listed(
    unfinished: Iterable[OpenTransaction], outcomes: TransactionOutcomes, *, limit: int
) -> list[dict[str, Any]]:
    """Return the state of the latest `limit` transactions, newest first.

    A finished transaction has the time of its end, an open transaction the time of its begin.
    """
    states: list[tuple[int, int, dict[str, Any]]] = []

    def add(
        spec: TransactionSpec,
        status: TransactionStatus,
        row_count: int,
        timestamp_us: int | None = None,
        reason: str = "",
    ) -> None:
        entry = {
            "transaction_id": spec.transaction_id or None,
            "operation": str(spec.operation),
            "app_id": spec.app_id,
            "version": spec.version,
            "begun_timestamp_us": spec.begun_us,
            "status": str(status),
            "row_count": row_count,
            "timestamp_us": timestamp_us,
            "reason": reason[:_REASON_LENGTH_MAX],
        }
        # Of those of one moment the one that was added last is the newest.
        states.append((spec.begun_us if timestamp_us is None else timestamp_us, len(states), entry))

    for refusal in outcomes.refusals:
        spec, row_count, error, timestamp_us = refusal
        add(spec, TransactionStatus.REFUSED, row_count, timestamp_us, error.message)
    for skip in outcomes.skips:
        add(skip.spec, TransactionStatus.SKIPPED, 0, skip.timestamp_us)
    for outcome in sorted(outcomes.remembered, key=lambda outcome: outcome.number):
        result = outcome.result
        add(outcome.spec, result.status, result.row_count, result.timestamp_us)
    for transaction in unfinished:
        add(transaction.spec, transaction.status, transaction.row_count)
    return [entry for *_, entry in heapq.nlargest(limit, states)]


def digest_of(parts: Sequence[str], linked: LinkedCommit | None = None) -> str:
    """Return the identity of the parts of a commit."""
    named: list[Any] = list(parts)
    if linked is not None:
        named.append(linked.to_json())
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()
