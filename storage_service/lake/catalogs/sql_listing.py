"""All tables of a SQL catalog in one query: where each has its metadata."""

from __future__ import annotations

from pyiceberg.catalog import Catalog
from pyiceberg.catalog.sql import IcebergTables, SqlCatalog
from sqlalchemy import select
from sqlalchemy.orm import Session

__all__ = ["metadata_locations"]


def metadata_locations(catalog: SqlCatalog) -> dict[tuple[str, ...], str]:
    """Return identifier -> location of the current metadata file."""
    columns = select(
        IcebergTables.table_namespace, IcebergTables.table_name, IcebergTables.metadata_location
    ).where(IcebergTables.catalog_name == catalog.name)
    with Session(catalog.engine) as session:
        rows = session.execute(columns).all()
    return {
        (*Catalog.identifier_to_tuple(str(namespace)), str(name)): str(location)
        for namespace, name, location in rows
        if location is not None
    }
