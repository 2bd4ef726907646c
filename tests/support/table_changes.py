"""What `POST transactions/commit` of the Iceberg REST protocol takes."""

from __future__ import annotations

from typing import Any

from pyiceberg.catalog import Catalog
from pyiceberg.table import Table, Transaction
from pyiceberg.types import LongType

__all__ = ["adding_column", "change_of"]


def change_of(table: Table, transaction: Transaction) -> dict[str, Any]:
    """What `transaction` does to `table`, as one of the `table-changes`."""
    *namespace, name = table.name()
    return {
        "identifier": {"namespace": namespace, "name": name},
        "requirements": [
            r.model_dump(mode="json", by_alias=True) for r in transaction._requirements
        ],
        "updates": [u.model_dump(mode="json", by_alias=True) for u in transaction._updates],
    }


def adding_column(catalog: Catalog, path: str, column: str) -> dict[str, Any]:
    """The change of a table that gets a column of longs."""
    table = catalog.load_table(path)
    transaction = table.transaction()
    with transaction.update_schema() as update:
        update.add_column(column, LongType())
    return change_of(table, transaction)
