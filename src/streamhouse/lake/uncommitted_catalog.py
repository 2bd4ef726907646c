"""A catalog whose commits stay in memory: for snapshots that are shown and never committed.

Tables come from a real catalog, and a commit changes only the copy here. New manifests and lists go
into a folder of their own, below the table's metadata.
"""

from __future__ import annotations

import uuid
from typing import Any, Final

from pyiceberg.catalog import Catalog, MetastoreCatalog
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.io import FileIO
from pyiceberg.serializers import ToOutputFile
from pyiceberg.table import CommitTableResponse, CreateTableTransaction, Table
from pyiceberg.table.locations import LocationProvider
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import SnapshotLogEntry
from pyiceberg.table.update import TableRequirement, TableUpdate, update_table_metadata

from streamhouse.lake.guards.table_commits import LakeMetadata

__all__ = ["UncommittedCatalog", "written_metadata"]

_NOWHERE: Final = ""


class UncommittedCatalog(NoopCatalog):
    """Tables of `catalog`, with commits that only this object sees. Not thread-safe.

    `folder` is the last part of the path of new metadata files; it is set before each commit.
    """

    def __init__(self, catalog: Catalog) -> None:
        super().__init__(catalog.name, **catalog.properties)
        self._catalog = catalog
        self._tables: dict[tuple[str, ...], Table | None] = {}
        self.folder = _NOWHERE

    def forget(self) -> None:
        """Drop all commits: the next `load_table` asks the real catalog."""
        self._tables.clear()

    def load_table(self, identifier: Any) -> Table:
        """See `Catalog.load_table`."""
        key = self.identifier_to_tuple(identifier)
        if key not in self._tables:
            loaded = self._catalog.load_table(key)
            self._keep(key, loaded.metadata, loaded.metadata_location, loaded.io)
        table = self._tables[key]
        if table is None:
            raise NoSuchTableError(f"table {'.'.join(key)} has another name now")
        return table

    def commit_table(
        self,
        table: Table,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> CommitTableResponse:
        """Apply a commit in memory; see `Catalog.commit_table`."""
        key = table.name()
        base = self._tables.get(key)
        for requirement in requirements:
            requirement.validate(None if base is None else base.metadata)
        metadata = update_table_metadata(
            MetastoreCatalog._empty_table_metadata() if base is None else base.metadata,
            updates,
            enforce_validation=base is None,
        )
        location = _NOWHERE if base is None else base.metadata_location
        self._keep(key, metadata, location, table.io)
        return CommitTableResponse.model_construct(metadata=metadata, metadata_location=location)

    def create_namespace_if_not_exists(self, namespace: Any, properties: Any = None) -> None:
        """Create a database's namespace in the real catalog, which proposes locations in it."""
        self._catalog.create_namespace_if_not_exists(namespace, properties or {})

    def create_table_transaction(self, *args: Any, **kwargs: Any) -> CreateTableTransaction:
        """Return the real catalog's proposal for a new table; nothing is created."""
        return self._catalog.create_table_transaction(*args, **kwargs)

    def rename_table(self, from_identifier: Any, to_identifier: Any) -> Table:
        """Free the name in memory."""
        del to_identifier
        table = self.load_table(from_identifier)
        self._tables[self.identifier_to_tuple(from_identifier)] = None
        return table

    def _keep(
        self, key: tuple[str, ...], metadata: TableMetadata, location: str, io: FileIO
    ) -> None:
        self._tables[key] = _UncommittedTable(key, metadata, location, io, self)


class _UncommittedTable(Table):
    """A table whose new metadata files go into the catalog's folder for them."""

    catalog: UncommittedCatalog

    def location_provider(self) -> LocationProvider:
        """See `Table.location_provider`."""
        provider = super().location_provider()
        provider.metadata_path = f"{provider.metadata_path}/{self.catalog.folder}"
        return provider


def written_metadata(table: Table, *, base: TableMetadata) -> LakeMetadata:
    """Return the metadata of `table` with one snapshot more than `base`, and its new file.

    The snapshots between them are left out: the last one has all their files.
    """
    metadata = table.metadata
    last = metadata.snapshot_by_name(MAIN_BRANCH)
    parent_id = base.current_snapshot_id
    if last is not None and last.snapshot_id != parent_id:
        last = last.model_copy(update={"parent_snapshot_id": parent_id})
        entry = SnapshotLogEntry.model_validate(
            {"snapshot-id": last.snapshot_id, "timestamp-ms": last.timestamp_ms}
        )
        metadata = metadata.model_copy(
            update={
                "snapshots": [*base.snapshots, last],
                "snapshot_log": [*base.snapshot_log, entry],
            }
        )
    location = table.location_provider().new_metadata_location(f"{uuid.uuid4().hex}.metadata.json")
    ToOutputFile.table_metadata(metadata, table.io.new_output(location))
    return LakeMetadata(metadata_location=location, metadata=metadata)
