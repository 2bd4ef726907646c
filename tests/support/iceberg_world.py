"""Iceberg tables that are not Streamhouse's, in a catalog that a service would name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.io.pyarrow import _dataframe_to_data_files
from pyiceberg.table import Table
from pyiceberg.typedef import Record

from streamhouse.client import StorageClient
from streamhouse.connector.stream._append_stream import AppendStreamReader
from streamhouse.core.model.lake.facts import LakeCatalog
from streamhouse.reading.options.options import BATCH, STREAM, as_options, read_options
from streamhouse.reading.plan.iceberg_read import source_state
from streamhouse.reading.plan.pinned_table import read_table
from streamhouse.reading.plan.row_form import row_request, table_columns
from streamhouse.reading.scan.split_reader import read_split
from tests.support.foreign_deletes import (
    commit_compaction,
    commit_delete_files,
    position_delete_file,
)
from tests.support.tiering_world import lake_in_folder

__all__ = ["IcebergWorld", "ids_of", "numbered"]


class _CatalogOnly:
    """All that such reads ask of the service."""

    def __init__(self, catalog: LakeCatalog) -> None:
        self._catalog = catalog

    def lake_catalog(self) -> LakeCatalog:
        return self._catalog


class IcebergWorld:
    """Closed by `with`, because catalogs hold connections."""

    NAME = "shop.clicks"

    def __init__(self, folder: Path) -> None:
        lake = lake_in_folder(folder)
        self.client = cast("StorageClient", _CatalogOnly(lake))
        # Another name would be another catalog in the same database.
        self.catalog = SqlCatalog(lake.name, **lake.properties)
        self.catalog.create_namespace("shop")

    def __enter__(self) -> IcebergWorld:
        return self

    def __exit__(self, *error: object) -> None:
        self.catalog.close()

    def create(self, schema: Any, **options: Any) -> Table:
        return self.catalog.create_table(self.NAME, schema, **options)

    def table(self) -> Table:
        return self.catalog.load_table(self.NAME)

    def append(self, *parts: pa.Table) -> None:
        """Append the parts in one snapshot, each in a file of its own."""
        table = self.table()
        with (
            table.transaction() as change,
            change.update_snapshot().fast_append() as snapshot,
        ):
            for part in parts:
                for file in _dataframe_to_data_files(table.metadata, part, table.io):
                    snapshot.append_data_file(file)

    def add_without_ids(self, rows: pa.Table, name: str) -> None:
        """Add a file that was written without field ids, as other programs than engines do."""
        path = f"{self.table().location()}/data/{name}.parquet"
        place = Path(path.removeprefix("file://"))
        place.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, place)
        self.table().add_files([path])

    def paths(self) -> list[str]:
        """The data files there are now, oldest first."""
        return sorted(task.file.file_path for task in self.table().scan().plan_files())

    def delete_at(self, path: str, *positions: int) -> None:
        """Delete rows of a data file by their positions, as an engine that merges on read."""
        table = self.table()
        deletes = position_delete_file(table, [(path, p) for p in positions], partition=Record())
        commit_delete_files(table, [deletes])

    def rewrite(self) -> None:
        """Put all rows into one file, as compaction does: a snapshot that replaces."""
        commit_compaction(self.table())

    def expire(self, *snapshot_ids: int) -> None:
        self.table().maintenance.expire_snapshots().by_ids(list(snapshot_ids)).commit()

    def snapshot_ids(self) -> list[int]:
        return [entry.snapshot_id for entry in self.table().history()]

    def read(self, **options: Any) -> pa.Table:
        given = as_options(options) | {"table": f"{self.NAME}$iceberg"}
        return read_table(self.client, read_options(given, use=BATCH))

    def stream(self, **options: str) -> AppendStreamReader:
        """A reader as the format makes one."""
        given = {"table": f"{self.NAME}$iceberg", "longPollMs": "0", **options}
        read = read_options(given, use=STREAM)
        state = source_state(self.client, read.connection.name, columns=read.columns)
        output = table_columns(
            state.table, columns=read.columns, include_metadata=False, has_change_type=False
        )
        schema = pa.schema([column.to_arrow() for column in output])
        request = row_request(state.table, read, output)
        return AppendStreamReader(read, state.table, request, schema, self.client)


def numbered(start: int, end: int) -> pa.Table:
    """Rows with ids [start, end)."""
    ids = range(start, end)
    return pa.table(
        {"id": pa.array(ids, pa.int64()), "name": pa.array([f"n{i}" for i in ids], pa.string())}
    )


def ids_of(stream: AppendStreamReader, start: Any, end: Any) -> list[int]:
    """The ids of a micro-batch, in the order of its splits."""
    found: list[int] = []
    for partition in stream.partitions(start, end):
        split, context = partition.split, partition.context  # type: ignore[attr-defined]
        for batch in read_split(split, context):
            found += batch.column("id").to_pylist()
    return found
