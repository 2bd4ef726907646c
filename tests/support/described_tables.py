"""A service that only knows tables: what planning a write asks for, without a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from streamhouse.storage_service.client import StorageClient
from streamhouse.storage_service.errors import DatabaseExistsError, TableNotFoundError
from streamhouse.storage_service.model.partitioning import PartitionField
from streamhouse.storage_service.model.schema import Schema
from streamhouse.storage_service.model.table import TableDescriptor, TableInfo, TablePath

__all__ = ["DescribedTables"]


class DescribedTables(StorageClient):
    """Creates and describes tables in memory."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.infos: dict[str, TableInfo] = {}

    def create_database(self, name: str) -> None:
        """There is every database already."""
        raise DatabaseExistsError(f"database '{name}' exists")

    def describe_table(self, path: str) -> TableInfo:
        """Return a table created before."""
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
