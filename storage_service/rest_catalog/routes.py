"""The table routes of the REST catalog, besides commits."""

from __future__ import annotations

import logging
from typing import Any

from pyiceberg.catalog import Catalog, MetastoreCatalog
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import StagedTable, Table
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER, SortOrder

from streamhouse.storage_service.errors import (
    ForbiddenError,
    InvalidRequestError,
    TableExistsError,
    TableNotFoundError,
)
from streamhouse.storage_service.lake.guards.commit_guard import is_left_layout, protecting_table
from streamhouse.storage_service.lake.guards.live_tables import LiveTables
from streamhouse.storage_service.lake.guards.table_commits import check_new_table
from streamhouse.storage_service.lake.snapshots.table_files import (
    check_registration,
    delete_files,
    own_files,
)
from streamhouse.storage_service.rest_catalog.rest_request import (
    RestAnswer,
    RestRequest,
    page_of,
    texts_of,
)
from streamhouse.storage_service.rest_catalog.table_json import FileAccess, metadata_answer

__all__ = ["TableRoutes", "identifier_of"]

_logger = logging.getLogger(__name__)

Identifier = tuple[str, ...]


def identifier_of(value: Any) -> Identifier:
    """Read a table's identifier as the protocol writes it."""
    namespace = value.get("namespace") if isinstance(value, dict) else None
    name = value.get("name") if isinstance(value, dict) else None
    parts = namespace if isinstance(namespace, list) else []
    if not parts or not isinstance(name, str) or not all(isinstance(p, str) for p in parts):
        raise InvalidRequestError("a table identifier must have a namespace (a list) and a name")
    return (*parts, name)


class TableRoutes:
    """Lists, loads, creates, registers, renames and drops tables of one catalog."""

    def __init__(self, catalog: Catalog, tables: LiveTables, files: FileAccess) -> None:
        self._catalog = catalog
        self._tables = tables
        self._files = files

    def list(self, namespace: Identifier, request: RestRequest) -> RestAnswer:
        """Answer the tables of a namespace."""
        found = self._catalog.list_tables(namespace)
        if not found:
            # Raises when there is no such namespace.
            self._catalog.load_namespace_properties(namespace)
        page, token = page_of(
            [(i[-1], {"namespace": list(i[:-1]), "name": i[-1]}) for i in found], request.query
        )
        return RestAnswer.of({"identifiers": page, "next-page-token": token})

    def load(self, identifier: Identifier, request: RestRequest) -> RestAnswer:
        """Answer a table's metadata and how its files are opened."""
        mode = request.query.get("snapshots", "all")
        if mode not in ("all", "refs"):
            raise InvalidRequestError(f"snapshots = '{mode[:20]}' must be all or refs")
        return self._loaded(
            self._catalog.load_table(identifier), request, only_referenced=mode == "refs"
        )

    def exists(self, identifier: Identifier) -> RestAnswer:
        """Answer 204 if there is such a table."""
        if not self._catalog.table_exists(identifier):
            raise TableNotFoundError(f"lake table '{'.'.join(identifier)}' does not exist")
        return RestAnswer(204)

    def credentials(self, identifier: Identifier) -> RestAnswer:
        """Answer the credentials for a table's files."""
        location = self._catalog.load_table(identifier).metadata.location
        return RestAnswer.of({"storage-credentials": self._files.storage_credentials(location)})

    def create(self, namespace: Identifier, request: RestRequest) -> RestAnswer:
        """Create a table, or with `stage-create` only say what it would be."""
        body = request.json()
        identifier = (*namespace, _name(body))
        properties = texts_of(body.get("properties") or {}, name="properties")
        location = body.get("location")
        if location is not None and not isinstance(location, str):
            raise InvalidRequestError("location must be a text")
        check_new_table(identifier, properties, self._tables)
        spec, order = body.get("partition-spec"), body.get("write-order")
        arguments: dict[str, Any] = {
            "schema": Schema.model_validate(body.get("schema")),
            "location": location,
            "partition_spec": PartitionSpec.model_validate(spec)
            if spec
            else UNPARTITIONED_PARTITION_SPEC,
            "sort_order": SortOrder.model_validate(order) if order else UNSORTED_SORT_ORDER,
            "properties": properties,
        }
        if not body.get("stage-create"):
            return self._loaded(self._catalog.create_table(identifier, **arguments), request)
        if self._catalog.table_exists(identifier):
            # Its commit could only fail, and better now.
            raise TableExistsError(f"lake table '{'.'.join(identifier)}' exists")
        transaction = self._catalog.create_table_transaction(identifier, **arguments)
        return self._loaded(transaction._table, request)

    def register(self, namespace: Identifier, request: RestRequest) -> RestAnswer:
        """Add a table whose metadata file exists."""
        body = request.json()
        identifier = (*namespace, _name(body))
        location = body.get("metadata-location")
        if not isinstance(location, str):
            raise InvalidRequestError("metadata-location must be a text")
        if self._tables.named(".".join(identifier)) is not None:
            check_new_table(identifier, {}, self._tables)
        metadata = check_registration(self._catalog, identifier, location)
        live = protecting_table(metadata, self._tables)
        if live is not None:
            raise ForbiddenError(
                f"'{location}' is the lake table of the streamhouse table '{live.info.path}'; two"
                " tables must not share its files"
            )
        overwrite = bool(body.get("overwrite", False))
        table = self._catalog.register_table(identifier, location, overwrite)
        return self._loaded(table, request)

    def drop(self, identifier: Identifier, request: RestRequest) -> RestAnswer:
        """Drop a table, with `purgeRequested` its files too."""
        self._check_droppable(identifier)
        purge = request.query.get("purgeRequested", "false").lower()
        if purge not in ("true", "false"):
            raise InvalidRequestError(f"purgeRequested = '{purge[:20]}' must be true or false")
        if purge == "true":
            self._purge(identifier)
        else:
            self._catalog.drop_table(identifier)
        return RestAnswer(204)

    def _purge(self, identifier: Identifier) -> None:
        """Drop a table and delete what it owns, and nothing that only its metadata names."""
        table = self._catalog.load_table(identifier)
        own = own_files(self._catalog, table)
        name = ".".join(identifier)
        if isinstance(self._catalog, MetastoreCatalog):
            self._catalog.drop_table(identifier)
            if own.foreign_count:
                _logger.warning(
                    "event=foreign_lake_files_stay table=%s files=%d first=%r",
                    *(name, own.foreign_count, own.first_foreign[:300]),
                )
            delete_files(table.io, own.paths)
        elif own.foreign_count:
            raise ForbiddenError(
                f"lake table '{name}' names files that are not below its location, such as"
                f" '{own.first_foreign[:300]}', and its catalog would delete them too; drop it"
                " without purgeRequested"
            )
        else:
            self._catalog.purge_table(identifier)

    def rename(self, request: RestRequest) -> RestAnswer:
        """Rename a table."""
        body = request.json()
        source = identifier_of(body.get("source"))
        destination = identifier_of(body.get("destination"))
        self._check_not_live(source, "renamed")
        check_new_table(destination, {}, self._tables)
        self._catalog.rename_table(source, destination)
        return RestAnswer(204)

    def _check_droppable(self, identifier: Identifier) -> None:
        """Raise `ForbiddenError` for a lake table that a streamhouse table has or a reader pinned.

        What a table has left of a batch layout that it has no more is nobody's to keep.
        """
        metadata = self._catalog.load_table(identifier).metadata
        live = protecting_table(metadata, self._tables)
        if live is None or not is_left_layout(metadata, live):
            self._check_not_live(identifier, "dropped")
            return
        there = {snapshot.snapshot_id for snapshot in metadata.snapshots}
        for snapshot_id in there.intersection(live.pinned):
            raise ForbiddenError(
                f"lake table '{'.'.join(identifier)}' must not be dropped: a reader has pinned its"
                f" snapshot {snapshot_id}; drop it when that pin has ended"
            )

    def _check_not_live(self, identifier: Identifier, what: str) -> None:
        live = protecting_table(self._catalog.load_table(identifier).metadata, self._tables)
        if live is not None:
            raise ForbiddenError(
                f"lake table '{'.'.join(identifier)}' must not be {what}: it holds the history of"
                f" the streamhouse table '{live.info.path}'; drop that one first"
            )

    def _loaded(
        self, table: Table, request: RestRequest, *, only_referenced: bool = False
    ) -> RestAnswer:
        is_staged = isinstance(table, StagedTable)
        return metadata_answer(
            None if is_staged else table.metadata_location,
            table.metadata,
            config=self._files.config(with_secrets=request.wants_credentials),
            only_referenced=only_referenced,
        )


def _name(body: dict[str, Any]) -> str:
    name = body.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError("name must be the table's name")
    return name
