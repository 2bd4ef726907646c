"""A service that knows tables and transactions: what a write asks for, without a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from streamhouse.client import StorageClient
from streamhouse.core.errors import (
    TableNotFoundError,
    TransactionClosedError,
    TransactionNotFoundError,
)
from streamhouse.core.model.partitioning import PartitionField
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.schema_change import change_schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath

__all__ = ["DescribedTables", "MemoryTransaction"]


@dataclass
class MemoryTransaction:
    """A transaction as `StorageClient` has them, its parts in memory."""

    tables: DescribedTables
    path: str
    transaction_id: str
    begun: dict[str, Any]
    is_skipped: bool = False
    status: str = "open"
    parts: dict[str, pa.Table] = field(default_factory=dict)

    @property
    def table(self) -> TableInfo:
        """The table it writes to."""
        return self.tables.describe_table(self.path)

    def stage(self, table: pa.Table) -> str:
        """Keep rows."""
        if self.status != "open":
            raise TransactionClosedError(f"transaction {self.transaction_id} is {self.status}")
        part = f"{self.transaction_id}.{len(self.parts)}"
        self.parts[part] = table
        return part

    def commit(self, parts: Sequence[str], *, rejected: object = None) -> None:
        """Make these parts rows of the table, once."""
        if self.status == "aborted":
            raise TransactionNotFoundError(f"transaction {self.transaction_id} was aborted")
        if self.status == "open":
            self.status = "committed"
            self.tables.committed.setdefault(self.path, []).append(
                [row for part in parts for row in self.parts[part].to_pylist()]
            )

    def abort(self) -> None:
        """Drop the parts, unless they are rows by now."""
        if self.status == "open":
            self.status = "aborted"


class DescribedTables(StorageClient):
    """Creates and describes tables in memory; those in `stale` are told of first."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.infos: dict[str, TableInfo] = {}
        self.stale: list[TableInfo] = []
        self.transactions: list[MemoryTransaction] = []
        self.committed: dict[str, list[list[dict[str, Any]]]] = {}

    def alter_schema(self, path: str, changes: Sequence[Mapping[str, Any]]) -> TableInfo:
        """Change a table's schema."""
        self.infos[path] = change_schema(self.infos[path], changes)
        return self.infos[path]

    def begin_transaction(self, path: str, **begun: Any) -> MemoryTransaction:
        """Begin a transaction, or join the open one of the same application and version."""
        self.describe_table(path)
        mine = [t for t in self.transactions if t.path == path and t.begun["app_id"] is not None
                and t.begun["app_id"] == begun["app_id"]]  # fmt: skip
        if any(t.status == "committed" and t.begun["version"] >= begun["version"] for t in mine):
            return MemoryTransaction(self, path, "", begun, is_skipped=True)
        for transaction in mine:
            if begun["join"] and transaction.status == "open" and transaction.begun == begun:
                return transaction
        transaction = MemoryTransaction(self, path, f"t{len(self.transactions)}", begun)
        self.transactions.append(transaction)
        return transaction

    def open_transaction(
        self, path: str, transaction_id: str, *, schema_id: int | None = None
    ) -> MemoryTransaction:
        """Return a transaction begun before."""
        return next(t for t in self.transactions if t.transaction_id == transaction_id)

    def describe_table(self, path: str) -> TableInfo:
        """Return a table created before."""
        if self.stale:
            return self.stale.pop(0)
        if path not in self.infos:
            raise TableNotFoundError(f"table '{path}' not found")
        return self.infos[path]

    def create_table(
        self,
        path: str,
        schema: pa.Schema,
        *,
        primary_key: Sequence[str] = (),
        bucket_count: int = 1,
        bucket_key: Sequence[str] = (),
        partitioned_by: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
    ) -> TableInfo:
        """Create a table, checked as the service checks it."""
        descriptor = TableDescriptor(
            path=TablePath.parse(path),
            schema=Schema.from_arrow(schema),
            primary_key=tuple(primary_key),
            bucket_count=bucket_count,
            bucket_key=tuple(bucket_key),
            partitioned_by=tuple(PartitionField.parse(text) for text in partitioned_by),
            properties=dict(properties or {}),
        )
        info = TableInfo(descriptor=descriptor, table_id=len(self.infos) + 1, created_at_us=0)
        self.infos[path] = info
        return info
