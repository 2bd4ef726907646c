"""Deciding transactions of one table and carrying decisions out, one at a time.

Event loop only. The order of a commit, each step durable before the next:

1. the table's write gate is held: no other write reaches the table until the end
2. every possible refusal is checked, including changes of the rows that the transaction has read
   (_read_conflicts.py)
3. `decision`: from here on the transaction happens, whatever breaks
4. the rows are stored, piece by piece, in the logs (and applied to the rows by key), still hidden
5. a linked transaction of another table is committed by the same steps
6. `outcome`: the offsets of the rows replace the decision
7. all buckets become visible in one step, and the gate opens
8. the staged files are deleted

A start of the service continues decided transactions at step 4, before the first use of the table.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from streamhouse.core.errors import (
    InternalError,
    StorageFailedError,
    StreamhouseError,
    UnknownOutcomeError,
)
from streamhouse.core.model.transaction import (
    CommitResult,
    LinkedCommit,
    TransactionOperation,
    TransactionStatus,
)
from streamhouse.core.traces.stages import stage_ended
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.engine.open_table import LogTable, OpenTable
from streamhouse.storage_service.engine.transactions._open_transaction import (
    OpenTransaction,
    digest_of,
)
from streamhouse.storage_service.engine.transactions._read_conflicts import ReadConflicts
from streamhouse.storage_service.engine.transactions._transaction_commit import (
    CommitServices,
    TransactionCommit,
)
from streamhouse.storage_service.engine.transactions._transaction_decision import check_and_start
from streamhouse.storage_service.engine.transactions._transaction_outcomes import (
    TransactionOutcomes,
)
from streamhouse.storage_service.engine.transactions.transaction_files import (
    Decision,
    TransactionFiles,
)
from streamhouse.storage_service.log.staged_part import StagedPart

__all__ = ["TransactionRunner"]

_logger = logging.getLogger(__name__)


class TransactionRunner:
    """See the module."""

    def __init__(
        self,
        table: OpenTable,
        files: TransactionFiles,
        outcomes: TransactionOutcomes,
        *,
        config: ServiceConfig,
        services: CommitServices,
    ) -> None:
        self._table = table
        self._files = files
        self._outcomes = outcomes
        self._config = config
        self._services = services
        self._runtime = services.runtime

    async def commit(
        self, transaction: OpenTransaction, *, on_outcome: Callable[[Decision], None]
    ) -> CommitResult:
        """Commit the named parts; `on_outcome` is called before the next commit can begin.

        After UnknownOutcomeError only a restart continues the commit; after any other error nothing
        has happened.
        """
        self._table.gate.check_open()
        conflicts = None
        if transaction.read is not None:
            parts = await self._runtime.run(self._open_parts, transaction)
            conflicts = self._conflicts(transaction, parts)
        if conflicts is not None:
            # Most of what others have changed is looked at while they go on.
            await self._runtime.run(conflicts.check)
            stage_ended("conflicts")
        # Any other commit takes its place among the writes at once: first come, first served.
        async with self._table.gate.alone():
            self._table.gate.check_open()
            stage_ended("gate")
            parts = await self._runtime.run(self._open_parts, transaction)
            with self._holding(transaction.linked):
                decision = await self._decide(transaction, parts, conflicts)
            stage_ended("decide")
            try:
                outcome = await self._carry_out(transaction, decision, parts)
            except StreamhouseError as error:
                raise self._given_up(transaction, error) from error
            except Exception as error:
                _logger.exception("event=bug table=%s", self._table.path)
                bug = InternalError("the commit met a bug; the service's log says which")
                raise self._given_up(transaction, bug) from error
            stage_ended("finish")
            on_outcome(outcome)
            return outcome.result

    @contextlib.contextmanager
    def _holding(self, linked: LinkedCommit | None) -> Iterator[None]:
        """Hold the linked transaction; after the decision the linked transaction stays held."""
        if linked is None:
            yield
            return
        self._services.links.hold(linked)
        try:
            yield
        except UnknownOutcomeError:
            # The decision may be on disk: only a restart tells.
            raise
        except BaseException:
            self._services.links.release(linked)
            raise

    async def redo(self, transaction: OpenTransaction) -> Decision:
        """Complete the decided transactions of the last run."""
        assert transaction.decision is not None
        self._table.clock.skip(transaction.decision.result.timestamp_us)
        parts = await self._runtime.run(self._open_parts, transaction)
        outcome = await self._carry_out(transaction, transaction.decision, parts)
        _logger.info(
            "event=transaction_completed table=%s transaction=%s rows=%d",
            self._table.path,
            transaction.transaction_id,
            outcome.result.row_count,
        )
        return outcome

    async def load_truncated(self, decisions: Iterable[Decision | None]) -> None:
        """Truncate the table as the last overwrite did; `decisions` are the decisions on disk."""
        offsets, timestamp_us = await self._runtime.run(self._files.load_truncated)
        self._table.truncate(offsets, timestamp_us=timestamp_us)
        for decision in decisions:
            if decision is not None and decision.result.status is TransactionStatus.COMMITTED:
                # Of the last overwrite only this may know where the rows begin.
                self._table.truncate(
                    decision.truncated_offsets, timestamp_us=decision.result.timestamp_us
                )
        # An overwrite without rows has a time that no log has.
        self._table.clock.skip(self._table.truncated_at_us)
        if self._table.truncated_offsets != offsets:
            await self._runtime.run(
                self._files.save_truncated,
                self._table.truncated_offsets,
                self._table.truncated_at_us,
            )

    def _open_parts(self, transaction: OpenTransaction) -> list[StagedPart]:
        return [
            self._files.open_part(transaction.transaction_id, part) for part in transaction.named
        ]

    def _conflicts(
        self, transaction: OpenTransaction, parts: Sequence[StagedPart]
    ) -> ReadConflicts | None:
        """Return the check for conflicts, if the rows of `parts` come from the table."""
        spec = transaction.spec
        if transaction.read is None or self._outcomes.is_stale(spec.app_id, spec.version):
            return None
        return ReadConflicts(
            self._table,
            spec.operation,
            transaction.read,
            parts,
            truncations_known=transaction.truncations_known,
        )

    async def _decide(
        self,
        transaction: OpenTransaction,
        parts: Sequence[StagedPart],
        conflicts: ReadConflicts | None,
    ) -> Decision:
        """Check everything that can be checked, then make the decision durable."""
        spec = transaction.spec
        self._outcomes.check_repeated(spec, table=str(self._table.path))
        decision = Decision(
            spec=spec,
            parts=(),
            parts_digest=digest_of(transaction.named, transaction.linked),
            starts={},
            result=CommitResult(
                status=TransactionStatus.SKIPPED,
                ranges={},
                row_count=0,
                timestamp_us=self._runtime.clock_us(),
            ),
        )
        if not self._outcomes.is_stale(spec.app_id, spec.version):
            if conflicts is not None:
                await self._table.settle()
                await self._runtime.run(conflicts.check)
            starts = await check_and_start(
                self._table, spec, parts, config=self._config, runtime=self._runtime
            )
            row_count = sum(part.row_count for part in parts)
            committing = replace(
                decision.result,
                status=TransactionStatus.COMMITTING,
                row_count=row_count,
                # The time of all rows: no cut by time has a part of a transaction.
                timestamp_us=self._table.clock.next_us(),
            )
            is_overwrite = spec.operation is TransactionOperation.OVERWRITE
            decision = replace(
                decision,
                parts=transaction.named,
                starts=starts,
                result=committing,
                is_truncating=is_overwrite and isinstance(self._table, LogTable),
                linked=transaction.linked,
            )
        decision = replace(decision, number=self._files.next_number)
        try:
            await self._runtime.run(self._files.decide, decision)
        except UnknownOutcomeError as error:
            raise self._given_up(transaction, error) from error
        return decision

    async def _carry_out(
        self, transaction: OpenTransaction, decision: Decision, parts: Sequence[StagedPart]
    ) -> Decision:
        """Store the decided rows, record the outcome, publish the rows; return the outcome."""
        if decision.result.status is not TransactionStatus.COMMITTING:
            if transaction.linked is not None:
                self._services.links.release(transaction.linked)
            return decision
        transaction.progress.row_count = decision.result.row_count
        commit = TransactionCommit(
            self._table,
            decision,
            parts,
            services=self._services,
            progress=transaction.progress,
        )
        ranges = await commit.store()
        linked = decision.linked
        if linked is not None:
            # Before the outcome: a start goes on with what has none.
            await commit.until_stored(lambda: self._services.links.commit(linked))
        result = replace(
            decision.result,
            status=TransactionStatus.COMMITTED,
            ranges=ranges,
        )
        outcome = replace(decision, parts=(), result=result)
        # Before it is visible: others write after that, and a redo must never follow them.
        await commit.until_stored(lambda: self._runtime.run(self._files.decide, outcome))
        if outcome.is_truncating:
            # Before the outcome may be forgotten.
            await commit.until_stored(
                lambda: self._runtime.run(
                    self._files.save_truncated, outcome.truncated_offsets, result.timestamp_us
                )
            )
        # First what goes, for those who read while this runs, on other threads.
        self._table.truncate(outcome.truncated_offsets, timestamp_us=result.timestamp_us)
        commit.publish()
        if linked is not None:
            self._table.count_rejected(linked.broken)
        return outcome

    def _given_up(
        self, transaction: OpenTransaction, error: StreamhouseError
    ) -> UnknownOutcomeError:
        """Close the table to writes: the log may have a part of a decided transaction."""
        given_up = UnknownOutcomeError(
            f"table '{self._table.path}': transaction {transaction.transaction_id} is decided, but"
            f" completed only by the next start of the service, and until then the table takes no"
            f" writes: {error.message}"
        )
        _logger.error("event=commit_interrupted why=%r", given_up.message)
        transaction.progress.trouble = error.message
        # Of others nothing is stored, which is no unknown outcome.
        self._table.gate.refuse(StorageFailedError(given_up.message))
        return given_up
