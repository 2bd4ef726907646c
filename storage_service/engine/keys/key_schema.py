"""Changing the schema of a primary key table that is in use."""

from __future__ import annotations

from streamhouse.storage_service.engine.keys.key_bucket import table_rules
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.errors import UnsupportedError
from streamhouse.storage_service.model.table import TableInfo

__all__ = ["change_key_schema", "check_no_transaction"]


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
            # Those that are out of use are made again with the schema there is then.
            if bucket.is_usable:
                bucket.rows.change_schema(rules)

    await table.key_writer.on_thread(change)
    table.info = info
    table.row_reader = None
