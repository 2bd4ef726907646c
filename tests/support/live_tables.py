"""The live tables of a service, as stock engines get them from its REST catalog."""

from __future__ import annotations

from duckdb import DuckDBPyConnection
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.rest import RestCatalog

__all__ = ["attach_live", "live_catalog"]


def live_catalog(endpoint: str, **more: str) -> RestCatalog:
    """Open the warehouse `live` of the service; `more` are properties as `token`."""
    uri = f"{endpoint}/iceberg"
    catalog = load_catalog("live", type="rest", uri=uri, warehouse="live", **more)
    assert isinstance(catalog, RestCatalog)
    return catalog


def attach_live(connection: DuckDBPyConnection, endpoint: str) -> None:
    """Attach the warehouse to DuckDB as `live`, as docs/catalog.md has it."""
    connection.execute(
        f"ATTACH 'live' AS live (TYPE ICEBERG, ENDPOINT '{endpoint}/iceberg',"
        " AUTHORIZATION_TYPE 'none')"
    )
