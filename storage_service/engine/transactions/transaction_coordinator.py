"""Transactions of all tables: what they share, cleaning up, and stopping. Event loop only."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.engine.directory.data_directory import DataDirectory
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.runtime import Runtime
from streamhouse.storage_service.engine.transactions.open_transaction import StagedBytes
from streamhouse.storage_service.engine.transactions.table_transactions import TableTransactions
from streamhouse.storage_service.engine.transactions.transaction_commit import CommitServices
from streamhouse.storage_service.engine.transactions.transaction_files import TransactionFiles
from streamhouse.storage_service.errors import StreamhouseError
from streamhouse.storage_service.log.group_commit import Submit
from streamhouse.storage_service.log.log_tablet import LogTablet

__all__ = ["TransactionCoordinator"]

# Staging writes and syncs files, which must not keep fetches and appends from their threads.
_THREADS: Final = 2


class TransactionCoordinator:
    """One a service."""

    def __init__(
        self,
        config: ServiceConfig,
        *,
        directory: DataDirectory,
        submit: Submit,
        deferred: set[LogTablet],
        runtime: Runtime,
    ) -> None:
        self._config = config
        self._directory = directory
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="transactions")
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
        )
        self._tables: dict[OpenTable, TableTransactions] = {}

    @property
    def open_count(self) -> int:
        """How many transactions are not finished."""
        return sum(transactions.open_count for transactions in self._tables.values())

    @property
    def staged_bytes(self) -> int:
        """How many bytes are staged."""
        return self._staged_bytes.held

    def of(self, table: OpenTable) -> TableTransactions:
        """Return the transactions of an open table."""
        return self._tables[table]

    async def open(self, table: OpenTable) -> None:
        """Load the transactions of `table` and complete those that are decided."""
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
        )
        try:
            await transactions.load()
            self._tables[table] = transactions
            await transactions.recover()
        except StreamhouseError as error:
            if table not in self._tables:
                self._staged_bytes.hold(-transactions.staged_bytes)
            raise type(error)(f"table '{table.path}' cannot be opened: {error.message}") from error

    async def forget(self, table: OpenTable) -> None:
        """Let go of the transactions of a dropped table."""
        transactions = self._tables.pop(table, None)
        if transactions is not None:
            await transactions.stop()
            self._staged_bytes.hold(-transactions.staged_bytes)

    async def drop_expired(self) -> None:
        """Drop the transactions that have timed out."""
        now_us = self._runtime.clock_us()
        for transactions in self._all():
            transactions.drop_expired(now_us)

    def _all(self) -> Iterable[TableTransactions]:
        return tuple(self._tables.values())

    async def stop(self) -> None:
        """Interrupt commits after the piece they are at; the next start completes them."""
        self._services.stopping.set()
        for transactions in self._all():
            await transactions.stop()
        self._threads.shutdown()
