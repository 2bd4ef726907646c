"""Reads Iceberg tables with DuckDB: requests as JSON on stdin, one line of rows each on stdout."""

from __future__ import annotations

import importlib.resources
import json
import sys

import duckdb

from integration.judges.json_rows import to_json


def connect() -> duckdb.DuckDBPyConnection:
    """A connection with the Iceberg extension from its wheel: nothing is fetched."""
    connection = duckdb.connect(
        config={
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
        }
    )
    for name in ("avro", "httpfs", "iceberg"):
        files = importlib.resources.files(f"duckdb_extension_{name}")
        path = files / "extensions" / f"v{duckdb.__version__}" / f"{name}.duckdb_extension"
        connection.load_extension(str(path))
    connection.execute("SET TimeZone = 'UTC'")
    return connection


def main() -> None:
    connection = connect()
    for metadata_location, query in json.load(sys.stdin):
        path = metadata_location.removeprefix("file://").replace("'", "''")
        connection.execute(
            f"CREATE OR REPLACE TEMP VIEW lake_table AS SELECT * FROM iceberg_scan('{path}')"
        )
        print(to_json(connection.execute(query).to_arrow_table().to_pylist()))


if __name__ == "__main__":
    main()
