"""Operations on the tables of a catalog besides commits, with protection for the service's own.

A lake table of a Streamhouse table is not renamed, dropped or replaced, and no other table is
created under its name or over its files.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pyiceberg.catalog import Catalog, MetastoreCatalog
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER, SortOrder

from streamhouse.core.errors import ForbiddenError, TableExistsError
from streamhouse.lake._scan_planning import next_tasks, planned_scan
from streamhouse.lake.catalogs.guarded_catalog import guard_of
from streamhouse.lake.guards._commit_guard import is_left_layout, protecting_table
from streamhouse.lake.guards.served_tables import ServedTables
from streamhouse.lake.guards.table_commits import LakeMetadata, check_new_table
from streamhouse.lake.snapshots._table_files import (
    check_registration,
    delete_files,
    own_files,
)

__all__ = ["CatalogTables"]

_logger = logging.getLogger(__name__)

Identifier = tuple[str, ...]


class CatalogTables:
    """Lists, loads, creates, registers, renames and drops tables of a catalog."""

    def __init__(self, catalog: Catalog, tables: ServedTables) -> None:
        self._catalog = catalog
        self._tables = tables

    def names(self, namespace: Identifier, *, is_database: bool = False) -> list[Identifier]:
        """Return the identifiers of the tables of a namespace.

        The namespace must be there, unless it `is_database` of the service: the namespace of a
        database comes with the first round.
        """
        if is_database and not self._catalog.namespace_exists(namespace):
            return []
        identifiers = self._catalog.list_tables(namespace)
        if not identifiers:
            # Raises for a missing namespace.
            self._catalog.load_namespace_properties(namespace)
        return identifiers

    def load(self, identifier: Identifier) -> LakeMetadata:
        """Return a table's metadata."""
        return LakeMetadata.of(self._catalog.load_table(identifier))

    def planned(
        self,
        identifier: Identifier,
        request: Mapping[str, Any],
        *,
        shown: LakeMetadata | None = None,
    ) -> dict[str, Any]:
        """Return the plan of a scan of a table, by default as the catalog has the table."""
        return planned_scan(self._table(identifier, shown), request)

    def planned_further(
        self, identifier: Identifier, plan_task: str, *, shown: LakeMetadata | None = None
    ) -> dict[str, Any]:
        """Return the page of a plan that a plan task names."""
        return next_tasks(self._table(identifier, shown), plan_task)

    def _table(self, identifier: Identifier, shown: LakeMetadata | None) -> Table:
        """Return the table as the catalog has it, or with the metadata `shown`."""
        if shown is None:
            return self._catalog.load_table(identifier)
        files = self._catalog._load_file_io(shown.metadata.properties, shown.table_location)
        location = shown.metadata_location or ""
        table = Table(identifier, shown.metadata, location, files, self._catalog)
        return guard_of(self._catalog).admitted(table)

    def exists(self, identifier: Identifier) -> bool:
        """Whether there is such a table."""
        return self._catalog.table_exists(identifier)

    def create(
        self,
        identifier: Identifier,
        *,
        schema: Any,
        partition_spec: Any,
        sort_order: Any,
        location: str | None,
        properties: dict[str, str],
        is_staged: bool,
    ) -> LakeMetadata:
        """Create a table from its parts as JSON; with `is_staged` return the table without creating
        it.
        """
        check_new_table(identifier, properties, self._tables)
        arguments: dict[str, Any] = {
            "schema": Schema.model_validate(schema),
            "location": location,
            "partition_spec": PartitionSpec.model_validate(partition_spec)
            if partition_spec
            else UNPARTITIONED_PARTITION_SPEC,
            "sort_order": SortOrder.model_validate(sort_order)
            if sort_order
            else UNSORTED_SORT_ORDER,
            "properties": properties,
        }
        if not is_staged:
            return LakeMetadata.of(self._catalog.create_table(identifier, **arguments))
        if self._catalog.table_exists(identifier):
            # Its commit could only fail, and better now.
            raise TableExistsError(f"lake table '{'.'.join(identifier)}' exists")
        transaction = self._catalog.create_table_transaction(identifier, **arguments)
        staged = transaction._table.metadata
        guard_of(self._catalog).make_local_folders(staged.location)
        return LakeMetadata(metadata_location=None, metadata=staged)

    def register(self, identifier: Identifier, location: str, *, overwrite: bool) -> LakeMetadata:
        """Add a table whose metadata file exists."""
        if self._tables.named(".".join(identifier)) is not None:
            check_new_table(identifier, {}, self._tables)
        if not overwrite and self._catalog.table_exists(identifier):
            raise TableExistsError(f"lake table '{'.'.join(identifier)}' exists")
        metadata = check_registration(self._catalog, identifier, location)
        live = protecting_table(metadata, self._tables)
        if live is not None:
            raise ForbiddenError(
                f"'{location}' is the lake table of the streamhouse table '{live.info.path}'; two"
                " tables must not share its files"
            )
        return LakeMetadata.of(self._catalog.register_table(identifier, location, overwrite))

    def rename(self, source: Identifier, destination: Identifier) -> None:
        """Rename a table."""
        self._check_not_live(source, self._metadata_of(source), "renamed")
        check_new_table(destination, {}, self._tables)
        self._catalog.rename_table(source, destination)

    def drop(self, identifier: Identifier) -> None:
        """Drop a table; its files stay."""
        self._check_droppable(identifier)
        self._catalog.drop_table(identifier)

    def purge(self, identifier: Identifier) -> None:
        """Drop a table and delete its own files, but no foreign files in its metadata."""
        self._check_droppable(identifier)
        table = self._catalog.load_table(identifier)
        files = own_files(self._catalog, table)
        name = ".".join(identifier)
        if isinstance(self._catalog, MetastoreCatalog):
            self._catalog.drop_table(identifier)
            if files.foreign_count:
                _logger.warning(
                    "event=foreign_lake_files_stay table=%s files=%d first=%r",
                    *(name, files.foreign_count, files.first_foreign[:300]),
                )
            delete_files(table.io, files.paths)
        elif files.foreign_count:
            raise ForbiddenError(
                f"lake table '{name}' names files that are not below its location, such as"
                f" '{files.first_foreign[:300]}', and its catalog would delete them too; drop it"
                " without purgeRequested"
            )
        else:
            self._catalog.purge_table(identifier)

    def _metadata_of(self, identifier: Identifier) -> TableMetadata:
        return self._catalog.load_table(identifier).metadata

    def _check_droppable(self, identifier: Identifier) -> None:
        """Raise `ForbiddenError` for a lake table that a streamhouse table has or a reader pinned.

        The remains of a dropped batch layout are not protected.
        """
        metadata = self._metadata_of(identifier)
        live = protecting_table(metadata, self._tables)
        if live is None or not is_left_layout(metadata, live):
            self._check_not_live(identifier, metadata, "dropped")
            return
        snapshot_ids = {snapshot.snapshot_id for snapshot in metadata.snapshots}
        for snapshot_id in snapshot_ids.intersection(live.pinned):
            raise ForbiddenError(
                f"lake table '{'.'.join(identifier)}' must not be dropped: a reader has pinned its"
                f" snapshot {snapshot_id}; drop it when that pin has ended"
            )

    def _check_not_live(self, identifier: Identifier, metadata: TableMetadata, what: str) -> None:
        live = protecting_table(metadata, self._tables)
        if live is not None:
            raise ForbiddenError(
                f"lake table '{'.'.join(identifier)}' must not be {what}: it holds the history of"
                f" the streamhouse table '{live.info.path}'; drop that one first"
            )
