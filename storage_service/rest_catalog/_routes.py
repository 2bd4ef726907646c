"""The routes of the REST catalog: namespaces, tables, and commits.

This module reads bodies and queries and writes answers. The calls of the catalog, and the guards of
the service's own tables, are in `lake/`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from streamhouse.core.errors import (
    DatabaseNotFoundError,
    InvalidRequestError,
    TableNotFoundError,
)
from streamhouse.core.model.lake.facts import OWNER_PROPERTIES, SERVICE_ID_PROPERTY
from streamhouse.core.model.values.units import parse_boolean
from streamhouse.lake.catalogs.guarded_catalog import check_namespace
from streamhouse.lake.catalogs.open_catalog import OpenCatalog
from streamhouse.lake.guards.catalog_tables import CatalogTables
from streamhouse.lake.guards.served_tables import ServedTables
from streamhouse.lake.guards.table_commits import (
    LakeMetadata,
    TableCommits,
    commit_request,
)
from streamhouse.storage_service.rest_catalog._catalog_properties import FileAccess
from streamhouse.storage_service.rest_catalog.rest_request import (
    LivePart,
    RestAnswer,
    RestRequest,
    page_of,
    texts_of,
)

__all__ = ["NamespaceRoutes", "TableRoutes", "namespace_of"]

Identifier = tuple[str, ...]
_SEPARATOR = "\x1f"


def namespace_of(segment: str) -> Identifier:
    """Return the namespace in a segment of the path."""
    parts = tuple(segment.split(_SEPARATOR))
    if not all(parts):
        raise InvalidRequestError(f"namespace {parts} has an empty part")
    return parts


class NamespaceRoutes:
    """Lists, creates, loads, changes and drops namespaces of one catalog.

    `databases` are shown as namespaces, too, whether or not the catalog has them.
    """

    def __init__(self, catalog: OpenCatalog, databases: Collection[str] = ()) -> None:
        self._catalog = catalog.get()
        self._databases = databases

    def list(self, request: RestRequest) -> RestAnswer:
        """Answer the namespaces directly below `parent`, or at the top level."""
        parent = request.query.get("parent", "")
        parent_parts = namespace_of(parent) if parent else ()
        if self._is_database_only(parent_parts):
            return RestAnswer.of({"namespaces": [], "next-page-token": None})
        namespaces = set(self._catalog.list_namespaces(parent_parts))
        if not parent_parts:
            namespaces.update((name,) for name in self._databases)
        if parent_parts and not namespaces and not self._catalog.namespace_exists(parent_parts):
            raise DatabaseNotFoundError(f"namespace '{'.'.join(parent_parts)}' does not exist")
        visible = [
            (_SEPARATOR.join(name), list(name)) for name in namespaces if request.sees(name[0])
        ]
        page, token = page_of(visible, request.query)
        return RestAnswer.of({"namespaces": page, "next-page-token": token})

    def create(self, request: RestRequest) -> RestAnswer:
        """Create a namespace with its properties."""
        body = request.json()
        parts = body.get("namespace")
        if not isinstance(parts, list) or not parts or not all(isinstance(p, str) for p in parts):
            raise InvalidRequestError("namespace must be a list of names")
        properties = texts_of(body.get("properties") or {}, name="properties")
        self._catalog.create_namespace(namespace_of(_SEPARATOR.join(parts)), properties)
        return RestAnswer.of({"namespace": parts, "properties": properties})

    def load(self, namespace: Identifier) -> RestAnswer:
        """Answer a namespace's properties."""
        if self._is_database_only(namespace):
            return RestAnswer.of({"namespace": list(namespace), "properties": {}})
        properties = self._catalog.load_namespace_properties(namespace)
        return RestAnswer.of({"namespace": list(namespace), "properties": dict(properties)})

    def drop(self, namespace: Identifier) -> RestAnswer:
        """Drop an empty namespace."""
        self._catalog.drop_namespace(namespace)
        return RestAnswer(204)

    def update(self, namespace: Identifier, request: RestRequest) -> RestAnswer:
        """Set and remove properties of a namespace."""
        body = request.json()
        removals = body.get("removals") or []
        if not isinstance(removals, list) or not all(isinstance(key, str) for key in removals):
            raise InvalidRequestError("removals must be a list of property names")
        updates = texts_of(body.get("updates") or {}, name="updates")
        check_namespace(self._catalog, updates)
        summary = self._catalog.update_namespace_properties(namespace, set(removals), updates)
        return RestAnswer.of(
            {"removed": summary.removed, "updated": summary.updated, "missing": summary.missing}
        )

    def _is_database_only(self, namespace: Identifier) -> bool:
        """Whether this is a database for which the catalog has no namespace yet."""
        is_database = len(namespace) == 1 and namespace[0] in self._databases
        return is_database and not self._catalog.namespace_exists(namespace)


class TableRoutes:
    """Lists, loads, creates, commits to, registers, renames and drops tables of one catalog.

    With `live` the service's own tables are shown as they are now. `live_of` is the service in a
    request of the warehouse `live`, which shows none of its lake tables as committed.
    """

    def __init__(
        self,
        catalog: OpenCatalog,
        tables: ServedTables,
        files: FileAccess,
        live: LivePart,
        *,
        live_of: str | None,
    ) -> None:
        self._live = live
        self._live_of = live_of
        self._tables = CatalogTables(catalog.get(), tables)
        self._commits = TableCommits(catalog.get(), tables)
        self._files = files

    def list(self, namespace: Identifier, request: RestRequest) -> RestAnswer:
        """Answer the tables of a namespace."""
        is_database = bool(self._live.databases)
        identifiers = self._tables.names(namespace, is_database=is_database)
        names = {i[-1] for i in identifiers if not self._is_owned(i)}.union(self._live.tables)
        page, token = page_of([(n, _json_of((*namespace, n))) for n in names], request.query)
        return RestAnswer.of({"identifiers": page, "next-page-token": token})

    def load(self, identifier: Identifier, request: RestRequest) -> RestAnswer:
        """Answer a table's metadata and the configuration for file access.

        Answers 304 if the caller has the same metadata and configuration.
        """
        mode = request.query.get("snapshots", "all")
        if mode not in ("all", "refs"):
            raise InvalidRequestError(f"snapshots = '{mode[:20]}' must be all or refs")
        metadata = self._load(identifier)
        config = self._files.config(with_secrets=request.wants_credentials)
        etag = _etag(metadata, mode, config)
        if etag in request.etags:
            return RestAnswer(304, etag=etag)
        answer = _metadata_answer(metadata, config=config, only_referenced=mode == "refs")
        return replace(answer, etag=etag)

    def plan(self, identifier: Identifier, request: RestRequest) -> RestAnswer:
        """Answer the files that a scan needs; see `planned_scan`."""
        plan = self._tables.planned(identifier, request.json(), shown=self._shown(identifier))
        if request.wants_credentials:
            location = self._load(identifier).table_location
            plan["storage-credentials"] = self._files.storage_credentials(location)
        return RestAnswer.of(plan)

    def tasks(self, identifier: Identifier, request: RestRequest) -> RestAnswer:
        """Answer the next files of a plan; see `next_tasks`."""
        plan_task = request.json().get("plan-task")
        if not isinstance(plan_task, str):
            raise InvalidRequestError("plan-task must be a text")
        shown = self._shown(identifier)
        return RestAnswer.of(self._tables.planned_further(identifier, plan_task, shown=shown))

    def exists(self, identifier: Identifier) -> RestAnswer:
        """Answer 204 if the table exists."""
        if self._live_of is not None and identifier[-1] not in self._live.tables:
            self._load(identifier)
        elif self._live_of is None and not self._tables.exists(identifier):
            raise TableNotFoundError(f"lake table '{'.'.join(identifier)}' does not exist")
        return RestAnswer(204)

    def credentials(self, identifier: Identifier) -> RestAnswer:
        """Answer the credentials for a table's files."""
        location = self._load(identifier).table_location
        return RestAnswer.of({"storage-credentials": self._files.storage_credentials(location)})

    def create(self, namespace: Identifier, request: RestRequest) -> RestAnswer:
        """Create a table, or with `stage-create` only answer the metadata of the new table."""
        body = request.json()
        identifier = (*namespace, _name(body))
        properties = texts_of(body.get("properties") or {}, name="properties")
        location = body.get("location")
        if location is not None and not isinstance(location, str):
            raise InvalidRequestError("location must be a text")
        created = self._tables.create(
            identifier,
            schema=body.get("schema"),
            partition_spec=body.get("partition-spec"),
            sort_order=body.get("write-order"),
            location=location,
            properties=properties,
            is_staged=bool(body.get("stage-create")),
        )
        return self._loaded(created, request)

    def register(self, namespace: Identifier, request: RestRequest) -> RestAnswer:
        """Add a table with an existing metadata file."""
        body = request.json()
        identifier = (*namespace, _name(body))
        location = body.get("metadata-location")
        if not isinstance(location, str):
            raise InvalidRequestError("metadata-location must be a text")
        overwrite = bool(body.get("overwrite", False))
        table = self._tables.register(identifier, location, overwrite=overwrite)
        return self._loaded(table, request)

    def rename(self, request: RestRequest) -> RestAnswer:
        """Rename a table."""
        body = request.json()
        source = _identifier_of(body.get("source"))
        self._tables.rename(source, _identifier_of(body.get("destination")))
        return RestAnswer(204)

    def drop(self, identifier: Identifier, request: RestRequest) -> RestAnswer:
        """Drop a table, with `purgeRequested` also the files."""
        if parse_boolean(request.query.get("purgeRequested", "false"), name="purgeRequested"):
            self._tables.purge(identifier)
        else:
            self._tables.drop(identifier)
        return RestAnswer(204)

    def commit(self, identifier: Identifier, request: RestRequest) -> RestAnswer:
        """Commit to one table."""
        body = request.json()
        named = body.get("identifier")
        if named is not None and _identifier_of(named) != identifier:
            raise InvalidRequestError(f"the path and the body name different tables: {identifier}")
        landed = self._commits.commit(identifier, commit_request(body, identifier))
        return replace(_metadata_answer(landed), committed=(identifier,))

    def commit_many(self, request: RestRequest) -> RestAnswer:
        """Commit to several tables, all or none."""
        changes = request.json().get("table-changes")
        if not isinstance(changes, list) or not all(isinstance(c, dict) for c in changes):
            raise InvalidRequestError("table-changes must be a list of commits")
        named = [(_identifier_of(change.get("identifier")), change) for change in changes]
        self._commits.commit_all(
            [(identifier, commit_request(change, identifier)) for identifier, change in named]
        )
        return RestAnswer(204, committed=tuple(identifier for identifier, _ in named))

    def _is_owned(self, identifier: Identifier) -> bool:
        return identifier[-1].partition("$")[0] in self._live.owned

    def _shown(self, identifier: Identifier) -> LakeMetadata | None:
        """Return what a request of the warehouse `live` plans on; None in the other warehouse."""
        return None if self._live_of is None else self._load(identifier)

    def _load(self, identifier: Identifier) -> LakeMetadata:
        if self._live.table is not None:
            return self._live.table
        if self._is_owned(identifier):
            raise TableNotFoundError(f"live table '{'.'.join(identifier)}' does not exist")
        loaded = self._tables.load(identifier)
        if self._live_of is not None and _is_of_service(loaded, self._live_of):
            raise TableNotFoundError(
                f"live table '{'.'.join(identifier)}' does not exist; the lake table of this name"
                " has what was committed of a dropped table, or of a table of another name: load it"
                " from the catalog's other warehouse"
            )
        return loaded

    def _loaded(self, table: LakeMetadata, request: RestRequest) -> RestAnswer:
        config = self._files.config(with_secrets=request.wants_credentials)
        return _metadata_answer(table, config=config)


def _is_of_service(table: LakeMetadata, service_id: str) -> bool:
    properties = table.metadata.properties
    # Earlier releases wrote no id of the service.
    is_own = properties.get(SERVICE_ID_PROPERTY, service_id) == service_id
    return is_own and not properties.keys().isdisjoint(OWNER_PROPERTIES)


def _metadata_answer(
    table: LakeMetadata, *, config: Mapping[str, str] | None = None, only_referenced: bool = False
) -> RestAnswer:
    parts = []
    if table.metadata_location is not None:
        parts.append(f'"metadata-location":{json.dumps(table.metadata_location)}')
    parts.append(f'"metadata":{table.to_text(only_referenced=only_referenced)}')
    if config is not None:
        parts.append(f'"config":{json.dumps(dict(config))}')
    return RestAnswer(200, ("{" + ",".join(parts) + "}").encode())


def _etag(table: LakeMetadata, mode: str, config: Mapping[str, str]) -> str | None:
    """Return the version of the answer about a table; a metadata file never changes."""
    if table.metadata_location is None:
        return None
    parts = json.dumps([table.metadata_location, mode, sorted(config.items())])
    return f'"{hashlib.sha256(parts.encode()).hexdigest()[:32]}"'


def _identifier_of(value: Any) -> Identifier:
    """Read a table's identifier in the form of the protocol."""
    namespace = value.get("namespace") if isinstance(value, dict) else None
    name = value.get("name") if isinstance(value, dict) else None
    parts = namespace if isinstance(namespace, list) else []
    if not parts or not isinstance(name, str) or not all(isinstance(p, str) for p in parts):
        raise InvalidRequestError("a table identifier must have a namespace (a list) and a name")
    return (*parts, name)


def _json_of(identifier: Identifier) -> dict[str, Any]:
    return {"namespace": [*identifier[:-1]], "name": identifier[-1]}


def _name(body: dict[str, Any]) -> str:
    name = body.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError("name must be the table's name")
    return name
