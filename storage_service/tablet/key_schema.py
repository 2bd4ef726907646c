"""Changing the schema of a primary key table that is in use."""

from __future__ import annotations

from collections.abc import Sequence

from streamhouse.storage_service.errors import UnsupportedError
from streamhouse.storage_service.model.changelog import OPERATION_DELETE
from streamhouse.storage_service.model.schema_change import in_current_version
from streamhouse.storage_service.model.table import TableInfo
from streamhouse.storage_service.tablet.key_bucket import table_rules
from streamhouse.storage_service.tablet.key_request import KeyWrite
from streamhouse.storage_service.tablet.open_table import OpenTable

__all__ = ["change_key_schema", "check_no_transaction", "whole_rows_of_now"]


def whole_rows_of_now(info: TableInfo, writes: Sequence[KeyWrite]) -> Sequence[KeyWrite]:
    """Return writes of whole rows with those of earlier schemas as rows of the current one.

    A request that was read before a change of the schema meets its table after it.
    """
    if len(info.schema_versions) == 1:
        return writes
    return [
        write
        if write.operations is not None and (write.operations == OPERATION_DELETE).all()
        else write._replace(rows=in_current_version(info, write.rows))
        for write in writes
    ]


def check_no_transaction(table: OpenTable, open_count: int) -> None:
    """Raise `UnsupportedError` while transactions are open: their rows have the old schema."""
    if open_count:
        raise UnsupportedError(
            f"table '{table.path}': its schema cannot change while {open_count} transactions are"
            " open; commit or abort them, or wait until they time out"
        )


async def change_key_schema(table: OpenTable, info: TableInfo) -> None:
    """Let the rows by key follow to `info`, whose schema is durable.

    Whoever calls holds the table's write gate. Rows that are there stay as they are stored.
    """
    assert table.key_writer is not None
    await table.key_writer.settle()
    rules = table_rules(info)

    def change() -> None:
        for bucket in table.key_buckets:
            bucket.rows.change_schema(rules)

    await table.key_writer.on_thread(change)
    table.info = info
    table.row_reader = None
