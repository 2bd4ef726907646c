"""Changing a table's schema: add, rename, widen, describe and drop columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from streamhouse.storage_service.client.transport import HttpTransport
from streamhouse.storage_service.model.schema import canonical_type, type_to_json
from streamhouse.storage_service.model.table import TableInfo, TablePath

__all__ = ["SchemaCalls"]


class SchemaCalls:
    """The calls of `StorageClient` that change schemas. Rows already written stay as they are."""

    _transport: HttpTransport

    def _remember(self, table: TableInfo) -> TableInfo:
        """Keep what is known of a table; `StorageClient` does."""
        raise NotImplementedError

    def describe_table(self, path: str) -> TableInfo:
        """Return the table; `StorageClient` does."""
        raise NotImplementedError

    def alter_schema(self, path: str, changes: Sequence[Mapping[str, Any]]) -> TableInfo:
        """Apply several changes, all or none; docs/schema_evolution.md has their form."""
        answer = self._transport.request_json(
            "PATCH",
            f"/v1/tables/{TablePath.parse(path)}/schema",
            body={"changes": [dict(change) for change in changes]},
        )
        return self._remember(TableInfo.from_json(answer))

    def add_column(
        self,
        path: str,
        name: str,
        data_type: pa.DataType,
        *,
        comment: str = "",
        after: str | None = None,
        first: bool = False,
    ) -> TableInfo:
        """Add a nullable column, at the end or where said; rows that are there have null in it."""
        json_type = type_to_json(canonical_type(data_type, where=name))
        change = {"add": name, "type": json_type, "comment": comment, "first": first}
        return self.alter_schema(path, [change | ({} if after is None else {"after": after})])

    def rename_column(self, path: str, name: str, new_name: str) -> TableInfo:
        """Rename a column; keys, partitioning and properties that use it follow."""
        return self.alter_schema(path, [{"rename": name, "to": new_name}])

    def widen_column(self, path: str, name: str, data_type: pa.DataType) -> TableInfo:
        """Give a column a larger type: int to bigint, float to double, decimals more digits."""
        json_type = type_to_json(canonical_type(data_type, where=name))
        return self.alter_schema(path, [{"widen": name, "to": json_type}])

    def comment_column(self, path: str, name: str, comment: str) -> TableInfo:
        """Set the comment of a column."""
        return self.alter_schema(path, [{"comment": name, "to": comment}])

    def drop_column(self, path: str, name: str, *, confirm: str) -> TableInfo:
        """Hide a column for good; `confirm` repeats its name."""
        return self.alter_schema(path, [{"drop": name, "confirm": confirm}])

    def alter_partitioning(self, path: str, partitioned_by: Sequence[str]) -> TableInfo:
        """Partition the lake by these expressions from now on, as in `["day(at)"]`.

        Files that are there stay in the partitions they are in.
        """
        answer = self._transport.request_json(
            "PUT",
            f"/v1/tables/{TablePath.parse(path)}/partitioning",
            body={"partitioned_by": list(partitioned_by)},
        )
        return self._remember(TableInfo.from_json(answer))

    def _version(self, path: str, schema_id: int | None) -> int:
        """Return the schema version to read in: the one asked for, else the current one."""
        return self.describe_table(path).schema_id if schema_id is None else schema_id
