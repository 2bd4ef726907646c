"""The transactions of one table: begin, stage, commit, abort, time out, and their outcomes.

Promises to callers:
- staged rows are durable, and hidden until the commit
- a commit stores all named parts or nothing, in all buckets, also across a crash: only a decision
  on disk is carried out. The rows become visible in one step
- a repeated commit gets the same answer, also after a refusal; staged parts missing from the commit
  are dropped
- an application commits a version once, and no lower version afterwards
- an aborted transaction, and a transaction without any call within its timeout, is dropped

Event loop only. The table's write gate admits a single commit at a time, without any other write.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from streamhouse.core.errors import (
    CommitConflictError,
    CorruptDataError,
    StreamhouseError,
    TransactionClosedError,
    TransactionNotFoundError,
    UnknownOutcomeError,
    UnsupportedError,
)
from streamhouse.core.model.transaction import (
    CommitResult,
    LinkedCommit,
    ReadPosition,
    TransactionOperation,
    TransactionStatus,
)
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.transactions._open_transaction import (
    OpenTransaction,
    StagedBytes,
    check_count,
    check_operation,
    check_part_count,
    check_parts,
    check_spec,
    digest_of,
    find_joinable,
    listed,
    spec_to_json,
)
from streamhouse.storage_service.engine.transactions._read_conflicts import check_read_offsets
from streamhouse.storage_service.engine.transactions._transaction_commit import CommitServices
from streamhouse.storage_service.engine.transactions._transaction_outcomes import (
    Refusal,
    Skip,
    TransactionOutcomes,
    new_transaction_id,
)
from streamhouse.storage_service.engine.transactions._transaction_runner import TransactionRunner
from streamhouse.storage_service.engine.transactions.state_agreement import disagreements
from streamhouse.storage_service.engine.transactions.transaction_files import (
    Decision,
    PartSize,
    TransactionFiles,
    TransactionSpec,
)
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.writer_state import TRANSACTION_WRITER

__all__ = ["TableTransactions"]

_logger = logging.getLogger(__name__)


class TableTransactions:
    """See the module. Call `load` and `recover` before the first use of the table."""

    def __init__(
        self,
        table: OpenTable,
        files: TransactionFiles,
        *,
        config: ServiceConfig,
        services: CommitServices,
        staged_bytes: StagedBytes,
        outcomes: TransactionOutcomes,
    ) -> None:
        self._table = table
        self._files = files
        self._config = config
        self._runtime = services.runtime
        self._bytes = StagedBytes(
            f"table '{table.path}'",
            "transaction_table_bytes_max",
            config.transaction_table_bytes_max,
            within=staged_bytes,
        )
        self._open: dict[str, OpenTransaction] = {}
        self.outcomes = outcomes
        self._runner = TransactionRunner(table, files, outcomes, config=config, services=services)
        self._storing: set[asyncio.Task[PartSize]] = set()
        self._deleting: set[asyncio.Future[None]] = set()
        self._dropping: dict[str, asyncio.Future[None]] = {}
        """Of aborted transactions whose files are being deleted: one may begin with such an id."""
        self._folding: asyncio.Future[None] | None = None

    @property
    def open_count(self) -> int:
        """The number of unfinished transactions."""
        return len(self._open)

    @property
    def staged_bytes(self) -> int:
        """The bytes staged, or being staged, by unfinished transactions."""
        return self._bytes.held

    def check_none_open(self) -> None:
        """Raise `UnsupportedError` for an open transaction: its rows fit the table as it is."""
        if self._open:
            raise UnsupportedError(
                f"table '{self._table.path}': schema and constraints stay while {len(self._open)}"
                " transactions are open; commit or abort them, or wait until they time out"
            )

    def spec(self, transaction_id: str) -> TransactionSpec:
        """Return the specification of an open transaction; otherwise raises as `stage`."""
        return self._staging(transaction_id).spec

    def status(self, transaction_id: str) -> dict[str, Any]:
        """Return the state of a transaction as JSON; raises TransactionNotFoundError."""
        outcome = self.outcomes.find(transaction_id)
        if outcome is not None:
            return {**spec_to_json(outcome.spec), **outcome.result.to_json()}
        return self._find(transaction_id).to_json()

    def latest(self, limit: int) -> list[dict[str, Any]]:
        """Return the outcomes of the latest remembered transactions as JSON, newest first."""
        return listed(self._open.values(), self.outcomes, limit=limit)

    # -- open transactions ---------------------------------------------------------------------

    async def begin(
        self,
        operation: TransactionOperation,
        *,
        columns: tuple[str, ...] | None,
        app_id: str | None,
        version: int | None,
        timeout_ms: int | None,
        join: bool = False,
        transaction_id: str | None = None,
        source: str | None = None,
        run: str | None = None,
    ) -> tuple[str, TransactionStatus]:
        """Begin a transaction and return its id, or say that `version` needs no work.

        Raises `InvalidRequestError` if `source` and `run` show different rows for the version.
        `join` gets an open transaction of the version, a repeated `transaction_id` its own.
        """
        outcome = self.outcomes.find(transaction_id or "")
        if outcome is not None:
            check_operation(outcome.spec, operation, table=str(self._table.path))
            return outcome.spec.transaction_id, outcome.result.status
        spec = TransactionSpec(
            transaction_id=transaction_id or new_transaction_id(self._files.next_number),
            operation=operation,
            columns=columns,
            app_id=app_id,
            version=version,
            timeout_ms=self._config.transaction_timeout_ms if timeout_ms is None else timeout_ms,
            begun_us=self._runtime.clock_us(),
            source=source,
            run=run,
        )
        check_spec(spec, self._config, table=str(self._table.path), join=join)
        self.outcomes.check_stream(spec, table=str(self._table.path))
        if self.outcomes.is_stale(app_id, version):
            self._skip(spec)
            return "", TransactionStatus.SKIPPED
        self._table.gate.check_open()
        if (dropping := self._dropping.get(spec.transaction_id)) is not None:
            await asyncio.wait([dropping])
        transaction = self._open.get(spec.transaction_id)
        if transaction is not None:
            check_operation(transaction.spec, operation, table=str(self._table.path))
            if transaction.commit is not None or transaction.decision is not None:
                return transaction.transaction_id, TransactionStatus.COMMITTING
        elif join:
            transaction = find_joinable(self._open.values(), spec)
        if transaction is None:
            check_count(self._open, self._config, table=str(self._table.path))
            # Counted before it is durable, or many at once could pass the limit.
            transaction = OpenTransaction(
                spec=spec,
                active_us=spec.begun_us,
                truncations_known=self._table.truncation_count,
            )
            self._open[spec.transaction_id] = transaction
            storing = self._runtime.run(self._files.begin, spec)
            transaction.beginning = asyncio.ensure_future(storing)
        transaction.active_us = self._runtime.clock_us()
        if transaction.beginning is not None:
            transaction.under_way += 1
            try:
                await asyncio.shield(transaction.beginning)
            except StreamhouseError:
                self._open.pop(transaction.transaction_id, None)
                raise
            finally:
                transaction.under_way -= 1
        return transaction.transaction_id, TransactionStatus.OPEN

    def _skip(self, spec: TransactionSpec) -> None:
        """Log and return that a version was committed before."""
        self.outcomes.check_repeated(spec, table=str(self._table.path))
        if self.outcomes.skip(Skip(replace(spec, transaction_id=""), spec.begun_us)):
            _logger.info(
                "event=transaction_skipped table=%s app_id=%s version=%s last_version=%s",
                self._table.path,
                spec.app_id,
                spec.version,
                self.outcomes.latest_version(spec.app_id),
            )
            self._runtime.observer.transaction_ended("skipped", row_count=0, seconds=0.0)

    async def stage(
        self,
        transaction_id: str,
        schema: pa.Schema,
        batches: Sequence[RoutedBatch],
        *,
        token: str | None,
    ) -> tuple[str, PartSize]:
        """Store rows as a part and return the part's id. A repeated `token` names the same part.

        Raises TransactionNotFoundError, or TransactionClosedError during a commit.
        """
        self._table.gate.check_open()
        self._table.check_versions(batches)
        transaction = self._staging(transaction_id)
        known = None if token is None else transaction.tokens.get(token)
        if known is not None:
            return known, transaction.parts[known]
        size = sum(len(batch.payload) for batch in batches)
        check_part_count(transaction, self._config, table=str(self._table.path))
        self._bytes.check(size)
        part_id = secrets.token_hex(8)
        self._bytes.hold(size)
        transaction.under_way += 1
        try:
            stage = functools.partial(self._files.stage, transaction_id, part_id)
            part = await self._stored(transaction, part_id, stage, schema, batches)
        except StreamhouseError:
            self._staging(transaction_id)  # When it ends its files go: that says more.
            raise
        finally:
            transaction.under_way -= 1
            transaction.active_us = self._runtime.clock_us()
            self._bytes.hold(-size)
        if not self._takes_parts(transaction):
            self._staging(transaction_id)
        transaction.parts[part_id] = part
        self._bytes.hold(part.size_bytes)
        if token is not None:
            transaction.tokens[token] = part_id
        return part_id, part

    async def _stored(
        self,
        transaction: OpenTransaction,
        part_id: str,
        stage: Callable[..., PartSize],
        *rows: Any,
    ) -> PartSize:
        """Store a part; the part is deleted again if the transaction ended meanwhile.

        `stop` waits for the store, whether or not the caller waits.
        """

        async def store() -> PartSize:
            part = await self._runtime.run(stage, *rows)
            if not self._takes_parts(transaction):
                self._delete(self._files.drop_parts, transaction.transaction_id, [part_id])
            return part

        def done(task: asyncio.Task[PartSize]) -> None:
            self._storing.discard(task)
            if not task.cancelled():
                task.exception()  # Nobody may be left to ask for it.

        storing = asyncio.create_task(store())
        self._storing.add(storing)
        storing.add_done_callback(done)
        return await asyncio.shield(storing)

    def _takes_parts(self, transaction: OpenTransaction) -> bool:
        is_open = self._open.get(transaction.transaction_id) is transaction
        return is_open and transaction.commit is None

    def abort(self, transaction_id: str) -> TransactionStatus:
        """Drop an undecided transaction; return the state afterwards."""
        outcome = self.outcomes.find(transaction_id)
        if outcome is not None:
            return outcome.result.status
        transaction = self._find(transaction_id)
        if transaction.commit is not None or transaction.held:
            return TransactionStatus.COMMITTING
        self._drop(transaction, "aborted")
        return TransactionStatus.ABORTED

    def drop_expired(self, now_us: int) -> None:
        """Drop the transactions without any call within their timeouts."""
        for transaction in [t for t in self._open.values() if t.has_expired(now_us)]:
            _logger.info(
                "event=transaction_timed_out table=%s transaction=%s",
                self._table.path,
                transaction.transaction_id,
            )
            self._drop(transaction, "timed_out")

    # -- commit --------------------------------------------------------------------------------

    async def commit(
        self,
        transaction_id: str,
        parts: Sequence[str],
        *,
        wait_s: float | None,
        read: ReadPosition | None = None,
        linked: LinkedCommit | None = None,
        is_linked: bool = False,
    ) -> CommitResult | None:
        """Commit the named parts in this order, all or none; None after `wait_s`.

        With `read` the commit raises `CommitConflictError`, and aborts the transaction, if the rows
        read by the transaction have changed. `is_linked` marks a commit on behalf of a transaction
        in another table, which holds this transaction.

        A commit goes on without its caller. After a retriable error the transaction is open as
        before; after any error but UnknownOutcomeError the transaction is aborted.
        """
        digest = digest_of(parts, linked)
        outcome = self.outcomes.find(transaction_id)
        if outcome is not None:
            self._check_same(outcome.parts_digest == digest, transaction_id)
            return outcome.result
        transaction = self._committable(transaction_id, read)
        if transaction.commit is None:
            if transaction.held and not is_linked:
                raise TransactionClosedError(
                    f"transaction {transaction_id} of '{self._table.path}' is being committed with"
                    " another table's; nothing was done by this call"
                )
            check_parts(transaction, parts, table=str(self._table.path))
            if read is not None:
                check_read_offsets(self._table, read)
            transaction.named, transaction.read, transaction.linked = tuple(parts), read, linked
            transaction.commit = asyncio.create_task(self._commit(transaction))
            # Nobody may be left to ask for it.
            transaction.commit.add_done_callback(lambda task: task.exception())
        same = digest_of(transaction.named, transaction.linked) == digest
        self._check_same(same, transaction_id)
        task = transaction.commit
        await asyncio.wait([task], timeout=wait_s)
        if not task.done():
            return None
        _raise_failure(task)
        return task.result()

    def hold(self, transaction_id: str, parts: Sequence[str]) -> None:
        """Keep a transaction that commits together with another table, until `release`."""
        transaction = self._staging(transaction_id)
        check_parts(transaction, parts, table=str(self._table.path))
        if transaction.spec.columns is not None:
            # Such rows may turn out to be impossible when the other table's are decided.
            raise UnsupportedError(
                f"transaction {transaction_id} of '{self._table.path}' updates named columns, and"
                " cannot be committed with another table's; stage whole rows"
            )
        transaction.held += 1

    def hold_all(self) -> None:
        """Keep all open transactions until the next start."""
        for transaction in self._open.values():
            transaction.held += 1

    def release(self, transaction_id: str) -> None:
        """Undo `hold`."""
        transaction = self._open.get(transaction_id)
        if transaction is not None:
            transaction.held -= 1

    def latest_version(self, app_id: str | None) -> int | None:
        """Return the last version committed by an application, as far as remembered."""
        return self.outcomes.latest_version(app_id)

    async def outcome(self, transaction_id: str) -> Decision | None:
        """Return the outcome of a finished commit; None while the commit runs.

        Raises the error of a failed commit.
        """
        transaction = self._open.get(transaction_id)
        if transaction is not None and transaction.commit is not None:
            await asyncio.wait([transaction.commit])
            _raise_failure(transaction.commit)
        return self.outcomes.find(transaction_id)

    async def _commit(self, transaction: OpenTransaction) -> CommitResult:
        started = asyncio.get_running_loop().time()

        def on_outcome(outcome: Decision) -> None:
            self._finish(transaction, outcome)
            self._runtime.observer.transaction_ended(
                str(outcome.result.status),
                row_count=outcome.result.row_count,
                seconds=asyncio.get_running_loop().time() - started,
            )

        try:
            return await self._runner.commit(transaction, on_outcome=on_outcome)
        except UnknownOutcomeError:
            raise
        except StreamhouseError as error:
            transaction.commit, transaction.named, transaction.linked = None, (), None
            if not error.retriable:
                rows, now_us = transaction.row_count, self._runtime.clock_us()
                self.outcomes.refuse(Refusal(transaction.spec, rows, error, now_us))
                self._drop(transaction, "aborted")
            raise

    def _check_same(self, is_same: bool, transaction_id: str) -> None:
        if not is_same:
            raise TransactionClosedError(
                f"transaction {transaction_id} of '{self._table.path}' was committed with other"
                " parts"
            )

    def _finish(self, transaction: OpenTransaction, outcome: Decision) -> None:
        self.outcomes.add(outcome)
        self._forget(transaction)
        self._delete(self._files.drop, transaction.transaction_id, list(transaction.parts))
        if self._folding is None or self._folding.done():
            due = self.outcomes.take_due()
            if due is not None:
                self._folding = self._delete(self._files.fold, due.own, due.remembered)

    # -- start and stop ------------------------------------------------------------------------

    async def load(self) -> None:
        """Read the transactions on disk."""
        loaded, folded = await self._runtime.run(self._files.load)
        for outcome in folded:
            self.outcomes.add(outcome, is_folded=True)
        for stored in sorted(loaded, key=lambda stored: stored.spec.begun_us):
            decision = stored.decision
            status = None if decision is None else decision.result.status
            if status in (None, TransactionStatus.COMMITTING):
                transaction = OpenTransaction(
                    spec=stored.spec,
                    parts=stored.parts,
                    active_us=self._runtime.clock_us(),
                    decision=decision,
                )
                if decision is not None:
                    transaction.named, transaction.linked = decision.parts, decision.linked
                self._open[transaction.transaction_id] = transaction
                self._bytes.hold(transaction.size_bytes)
            elif decision is not None:
                self.outcomes.add(decision)
                drop = self._files.drop
                await self._runtime.run(drop, stored.spec.transaction_id, list(stored.parts))
        self.outcomes.loaded(self._files.next_number)
        await self._runner.load_truncated(stored.decision for stored in loaded)
        for transaction in self._open.values():
            is_before = transaction.spec.begun_us <= self._table.truncated_at_us
            transaction.truncations_known = -1 if is_before else self._table.truncation_count
        decisions = [stored.decision for stored in loaded if stored.decision is not None]
        self._check_agreement([*folded, *decisions])
        if self._files.is_former:
            await self._runtime.run(
                self._files.upgrade,
                folded,
                self._table.truncated_offsets,
                self._table.truncated_at_us,
            )

    def _check_agreement(self, decisions: Iterable[Decision]) -> None:
        table = self._table
        sentences = disagreements(
            table.lake,
            truncated_offsets=table.truncated_offsets,
            decisions=decisions,
            log_starts={b: t.first_stored_offset for b, t in enumerate(table.tablets)},
            forgotten_offsets={b: t.forgotten_offset for b, t in enumerate(table.tablets)},
            transactions_us={
                bucket: tablet.last_batch_us(TRANSACTION_WRITER)
                for bucket, tablet in enumerate(table.tablets)
            },
        )
        if (first := next(sentences, None)) is not None:
            raise CorruptDataError(first)

    async def recover(self) -> None:
        """Complete the decided transactions of the last run; raises if that is impossible."""
        for transaction in [t for t in self._open.values() if t.decision is not None]:
            self._finish(transaction, await self._runner.redo(transaction))

    async def stop(self) -> None:
        """Return once commits have stopped after their present piece and no file changes."""
        commits = [t.commit for t in self._open.values() if t.commit is not None]
        await asyncio.gather(*commits, return_exceptions=True)
        # Also of transactions that were aborted while rows for them were on their way.
        await asyncio.gather(*self._storing, return_exceptions=True)
        await asyncio.gather(*self._deleting, return_exceptions=True)

    # -- inside --------------------------------------------------------------------------------

    def _find(self, transaction_id: str) -> OpenTransaction:
        transaction = self._open.get(transaction_id)
        if transaction is None:
            head = f"table '{self._table.path}' has no transaction '{transaction_id[:60]}'"
            if self.outcomes.is_uncommitted(transaction_id):
                raise TransactionNotFoundError(
                    f"{head}: it was refused, aborted, or timed out, and nothing of it was written"
                )
            raise TransactionNotFoundError(
                f"{head}: it was aborted, timed out, or was committed before the last"
                f" {self._config.transaction_outcomes_max} transactions, which are remembered;"
                " whether it is in the table show its rows, and the last_version of its app_id"
            )
        return transaction

    def _committable(self, transaction_id: str, read: ReadPosition | None) -> OpenTransaction:
        """Return an open transaction; else raises the remembered error of the commit.

        An uncommitted transaction with `read` raises a conflict: the caller must read again.
        """
        refused = self.outcomes.refusal(transaction_id)
        # One whose id was chosen may have been begun again.
        if refused is not None and transaction_id not in self._open:
            raise type(refused)(refused.message)
        try:
            return self._find(transaction_id)
        except TransactionNotFoundError as error:
            if read is None or not self.outcomes.is_uncommitted(transaction_id):
                raise
            raise CommitConflictError(
                f"{error.message}: read the table again, compute the rows anew and commit them in"
                " a new transaction"
            ) from None

    def _staging(self, transaction_id: str) -> OpenTransaction:
        if self.outcomes.find(transaction_id) is None:
            transaction = self._find(transaction_id)
            if transaction.commit is None:
                return transaction
        raise TransactionClosedError(
            f"transaction {transaction_id} of '{self._table.path}' is committed and takes no more"
            " rows"
        )

    def _drop(self, transaction: OpenTransaction, how: str) -> None:
        self._forget(transaction)
        transaction_id = transaction.transaction_id
        dropping = self._delete(self._files.drop, transaction_id, list(transaction.parts))
        self._dropping[transaction_id] = dropping
        dropping.add_done_callback(lambda _: self._dropping.pop(transaction_id, None))
        self._runtime.observer.transaction_ended(how, row_count=transaction.row_count, seconds=0.0)

    def _forget(self, transaction: OpenTransaction) -> None:
        del self._open[transaction.transaction_id]
        self._bytes.hold(-transaction.size_bytes)

    def _delete(self, function: Callable[..., None], *args: Any) -> asyncio.Future[None]:
        """Delete files in the background; the next start deletes remaining files."""
        deleting = asyncio.ensure_future(self._runtime.run(function, *args))
        self._deleting.add(deleting)

        def done(task: asyncio.Future[None]) -> None:
            self._deleting.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                _logger.warning("event=delete_failed table=%s why=%r", self._table.path, error)

        deleting.add_done_callback(done)
        return deleting


def _raise_failure(commit: asyncio.Task[CommitResult]) -> None:
    """Raise a copy of a finished commit's error: each caller raises an instance of its own."""
    error = commit.exception()
    if isinstance(error, StreamhouseError):
        raise type(error)(error.message)
