"""Transactions of all tables: shared state, cleanup, and the stop. Event loop only."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterable
from typing import Final

from streamhouse.core.errors import (
    CorruptDataError,
    StreamhouseError,
    TableNotFoundError,
    TransactionNotFoundError,
)
from streamhouse.core.model.table import TablePath
from streamhouse.core.model.transaction import LinkedCommit
from streamhouse.core.rows.companion import companion_of
from streamhouse.core.threads import Pool
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.directory.table_registry import TableRegistry
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.transactions._open_transaction import StagedBytes
from streamhouse.storage_service.engine.transactions._transaction_commit import CommitServices
from streamhouse.storage_service.engine.transactions._transaction_outcomes import (
    TransactionOutcomes,
)
from streamhouse.storage_service.engine.transactions.table_transactions import TableTransactions
from streamhouse.storage_service.engine.transactions.transaction_files import TransactionFiles
from streamhouse.storage_service.log.group_commit import Submit
from streamhouse.storage_service.log.log_tablet import LogTablet

__all__ = ["TransactionCoordinator"]

_logger = logging.getLogger(__name__)

# Staging writes and syncs files, which must not keep fetches and appends from their threads.
_THREADS: Final = 2


class TransactionCoordinator:
    """The transactions of one service."""

    def __init__(
        self,
        config: ServiceConfig,
        *,
        directory: DataDirectory,
        submit: Submit,
        deferred: set[LogTablet],
        runtime: Runtime,
        registry: TableRegistry,
    ) -> None:
        self._config = config
        self._directory = directory
        self._threads = Pool("transactions", _THREADS)
        self._runtime = dataclasses.replace(runtime, executor=self._threads)
        self._staged_bytes = StagedBytes(
            "the service", "transaction_bytes_max", config.transaction_bytes_max
        )
        self._services = CommitServices(
            submit=submit,
            runtime=self._runtime,
            deferred=deferred,
            chunk_bytes=config.transaction_chunk_bytes,
            stopping=asyncio.Event(),
            links=self,
        )
        self._tables: dict[OpenTable, TableTransactions] = {}
        self._registry = registry

    @property
    def open_count(self) -> int:
        """The number of unfinished transactions."""
        return sum(transactions.open_count for transactions in self._tables.values())

    @property
    def staged_bytes(self) -> int:
        """The number of staged bytes."""
        return self._staged_bytes.held

    def of(self, table: OpenTable) -> TableTransactions:
        """Return the transactions of an open table."""
        return self._tables[table]

    async def open(self, table: OpenTable) -> None:
        """Load the transactions of `table`, and complete the decided transactions."""
        files = TransactionFiles(
            self._directory.transactions(table.info.table_id),
            service_id=self._directory.service_id,
            table_id=table.info.table_id,
            filesystem=self._directory.filesystem,
            is_former=table.info.table_id in self._directory.former,
        )
        transactions = TableTransactions(
            table,
            files,
            config=self._config,
            services=self._services,
            staged_bytes=self._staged_bytes,
            outcomes=TransactionOutcomes(
                outcomes_max=self._config.transaction_outcomes_max,
                former_streams=self._registry.former_streams(table.path),
            ),
        )
        try:
            await transactions.load()
            self._tables[table] = transactions
            await transactions.recover()
        except StreamhouseError as error:
            if table not in self._tables:
                self._staged_bytes.hold(-transactions.staged_bytes)
            raise type(error)(f"table '{table.path}' cannot be opened: {error.message}") from error

    # -- what a commit of one table commits in another ---------------------------------------------

    def hold(self, linked: LinkedCommit) -> None:
        """See `Links.hold`."""
        transactions = self._linked(linked)
        if transactions is None:
            raise TableNotFoundError(f"table '{linked.table}' does not exist")
        transactions.hold(linked.transaction_id, linked.parts)

    def release(self, linked: LinkedCommit) -> None:
        """See `Links.release`."""
        transactions = self._linked(linked)
        if transactions is not None:
            transactions.release(linked.transaction_id)

    async def commit(self, linked: LinkedCommit) -> None:
        """See `Links.commit`. A dropped table has no commit left."""
        transactions = self._linked(linked)
        if transactions is None and linked.table in {
            str(table.path) for table in self._registry.damaged()
        }:
            raise CorruptDataError(
                f"table '{linked.table}', which gets rows of the same transaction, is damaged"
            )
        if transactions is None:
            _logger.warning("event=linked_table_dropped table=%s", linked.table)
            return
        try:
            await transactions.commit(
                linked.transaction_id, linked.parts, wait_s=None, is_linked=True
            )
        except TransactionNotFoundError:
            # Committed and forgotten, or the table is another one by now.
            _logger.warning("event=linked_transaction_gone table=%s", linked.table)

    def keep_linked(self, path: TablePath) -> None:
        """Keep the transactions linked to a decided transaction of a table that cannot be opened.

        All open transactions of the table of rejected rows are kept: none expires or commits alone.
        """
        for table, transactions in self._tables.items():
            if table.path == companion_of(path):
                transactions.hold_all()

    def _linked(self, linked: LinkedCommit) -> TableTransactions | None:
        path = TablePath.parse(linked.table)
        return next(
            (transactions for table, transactions in self._tables.items() if table.path == path),
            None,
        )

    async def forget(self, table: OpenTable) -> None:
        """Forget the transactions of a dropped table."""
        transactions = self._tables.pop(table, None)
        if transactions is not None:
            await transactions.stop()
            self._staged_bytes.hold(-transactions.staged_bytes)

    async def drop_expired(self) -> None:
        """Drop the expired transactions."""
        now_us = self._runtime.clock_us()
        for transactions in self._all():
            transactions.drop_expired(now_us)

    def _all(self) -> Iterable[TableTransactions]:
        return tuple(self._tables.values())

    async def stop(self) -> None:
        """Interrupt commits after their present piece; the next start completes the commits."""
        self._services.stopping.set()
        for transactions in self._all():
            await transactions.stop()
        self._threads.shutdown()
