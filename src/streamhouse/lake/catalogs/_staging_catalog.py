"""A catalog of one lake table whose commits stay in this process.

It applies a commit as a catalog does, and keeps the result; the catalog behind it never hears of
the commit. Files go into folders that the table's user names before.
"""

from __future__ import annotations

from typing import Any, cast

from pyiceberg.catalog import Catalog, MetastoreCatalog
from pyiceberg.table import CommitTableResponse, Table, TableProperties
from pyiceberg.table.locations import LocationProvider, SimpleLocationProvider
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import (
    AssertCreate,
    TableRequirement,
    TableUpdate,
    update_table_metadata,
)

from streamhouse.lake.catalogs._format_version import applicable
from streamhouse.lake.catalogs.guarded_catalog import guard_of
from streamhouse.lake.files.live_folders import LiveFolders

__all__ = ["StagingCatalog"]


class _StagingTable(Table):
    """A table whose new files go into the folders of its catalog."""

    def location_provider(self) -> LocationProvider:
        folders = cast(StagingCatalog, self.catalog).folders
        assert folders is not None, "files are written into folders"
        places = {
            TableProperties.WRITE_DATA_PATH: folders.data,
            TableProperties.WRITE_METADATA_PATH: folders.metadata,
        }
        return SimpleLocationProvider(
            self.metadata.location, {**self.metadata.properties, **places}
        )


class StagingCatalog:
    """Has the methods of a catalog that `IcebergLake` and its tables call. Not thread-safe."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._table: _StagingTable | None = None
        self.folders: LiveFolders | None = None
        """Where the next files go."""

    @property
    def properties(self) -> dict[str, str]:
        """Those of the catalog behind."""
        return self._catalog.properties

    def load_table(self, identifier: Any) -> Table:
        """Return the table as it is here, the first time as it is in the catalog behind."""
        if self._table is None:
            self._table = self._staging(self._catalog.load_table(identifier))
        return self._table

    def _staging(self, table: Table) -> _StagingTable:
        # Creations on their way have no metadata file yet.
        location = table.metadata_location or ""
        catalog = cast(Catalog, self)
        return _StagingTable(table.name(), table.metadata, location, table.io, catalog)

    def current_location(self, identifier: Any) -> str:
        """Return where the catalog behind has the table's metadata now."""
        return self._catalog.load_table(identifier).metadata_location

    def create_namespace_if_not_exists(self, namespace: Any) -> None:
        """Create the namespace in the catalog behind: it proposes no location without."""
        self._catalog.create_namespace_if_not_exists(namespace)

    def create_table_transaction(self, identifier: Any, schema: Any, **options: Any) -> Any:
        """Return what the catalog behind proposes for a new table; it creates none."""
        return self._catalog.create_table_transaction(identifier, schema, **options)

    def rename_table(self, identifier: Any, to_identifier: Any) -> None:
        """Make room for another table of the name, here only."""
        del identifier, to_identifier
        self._table = None

    def commit_table(
        self,
        table: Table,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> CommitTableResponse:
        """Apply a commit to the table, or to none for a creation, and keep the result."""
        is_new = any(isinstance(requirement, AssertCreate) for requirement in requirements)
        base: TableMetadata | None = None if is_new else table.metadata
        for requirement in requirements:
            requirement.validate(base)
        metadata = update_table_metadata(
            MetastoreCatalog._empty_table_metadata() if base is None else base,
            applicable(updates),
            enforce_validation=is_new,
        )
        if is_new:
            self._table = self._staging(table)
            self._table.metadata = metadata
            # It may lie elsewhere than proposed, and its files with it.
            guard_of(self._catalog).admitted(self._table)
        return CommitTableResponse.model_construct(
            metadata=metadata, metadata_location=table.metadata_location or ""
        )

    @staticmethod
    def _delete_old_metadata(*_: object) -> None:
        """Delete nothing: the files are those of the catalog behind."""

    def close(self) -> None:
        """Leave the catalog behind open."""
