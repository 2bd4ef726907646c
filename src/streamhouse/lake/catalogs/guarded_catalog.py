"""The only way to lake tables: any pyiceberg catalog, with `_policy.py` enforced.

Guarantees for every load and commit through a catalog from `guarded`:
- of a table's properties nothing chooses code, an endpoint or a credential: refused properties are
  not in its metadata, and no property of a table reaches its file IO
- its file IO opens and deletes only files below the table's location
- a new table lies below the warehouse, outside the data directory, and where no other table lies
- an error in a metadata file repeats nothing of the file
- the table may be one of format version 3, which pyiceberg's catalogs alone can only read

pyiceberg merges a table's properties over the catalog's for a file IO, and loads classes by the
names in them. Only this module makes a catalog, a file IO or a location provider.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import threading
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from pydantic import ValidationError as InvalidModelError
from pyiceberg.catalog import (
    _ENV_CONFIG,
    PY_CATALOG_IMPL,
    WAREHOUSE_LOCATION,
    Catalog,
    MetastoreCatalog,
)
from pyiceberg.exceptions import NoSuchTableError, ValidationError
from pyiceberg.io import PY_IO_IMPL, FileIO, load_file_io
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableResponse, CreateTableTransaction, StagedTable, Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    SetLocationUpdate,
    SetPropertiesUpdate,
    TableRequirement,
    TableUpdate,
)

from streamhouse.core.errors import CorruptDataError, ForbiddenError, UnsupportedError
from streamhouse.core.model.lake.facts import LAKE_PATHS_PROPERTY
from streamhouse.lake._policy import (
    FILE,
    Bounds,
    Place,
    Warehouse,
    bounds_of,
    check_lake_name,
    check_properties,
    kept_properties,
    location_of,
    place_of,
    places_of,
)
from streamhouse.lake.catalogs._format_version import applicable, write_metadata
from streamhouse.lake.files._bounded_io import bind, only_own

__all__ = [
    "GuardedCatalog",
    "check_namespace",
    "check_updates",
    "guard_of",
    "guarded",
    "unreadable_metadata",
]

_logger = logging.getLogger(__name__)

Identifier = tuple[str, ...]
_T = TypeVar("_T", Table, StagedTable)
_CODE: Final = (PY_IO_IMPL, PY_CATALOG_IMPL)
_LOCATION: Final = "location"
_METADATA_FOLDER: Final = "metadata"
_APPROVED_S: Final = 30.0
_WARNED_MAX: Final = 10_000
# Of the library's two refusals of a type that it cannot parse.
_UNPARSED_TYPE: Final = re.compile(
    r"(?:field type: '|Could not parse )(variant|geometry|geography)\b"
)
_warned: Final[set[tuple[str, tuple[str, ...]]]] = set()


@dataclass(slots=True)
class _Rules:
    """Where tables of one catalog may lie. `approved` are places of creations on their way."""

    warehouse: Warehouse | None
    extra_places: tuple[Place, ...]
    data_directory: Place | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    approved: dict[Identifier, tuple[Place, float]] = field(default_factory=dict)
    cached_places: dict[Identifier, Place] = field(default_factory=dict)

    @property
    def roots(self) -> list[Place]:
        return [*([] if self.warehouse is None else [self.warehouse.place]), *self.extra_places]


class GuardedCatalog(Catalog):
    """A mixin before the class of an open catalog; see `guarded`.

    Calls of `super()` reach the catalog's class; `Catalog` itself lacks most of these methods.
    """

    # An open catalog can only change to a class without slots of its own.
    __slots__ = ()
    rules: _Rules

    # -- tables as they are ----------------------------------------------------------------------

    def load_table(self, identifier: str | Identifier) -> Table:
        name = ".".join(Catalog.identifier_to_tuple(identifier))
        with unreadable_metadata(f"lake table '{name}'"):
            table: Table = _of(super()).load_table(identifier)
        return self.admitted(table)

    def admitted(self, table: _T) -> _T:
        """Return the table without forbidden properties, and bound to its own files."""
        name = ".".join(table.name())
        table.metadata = _scrubbed(name, table.metadata)
        bounds = self.bounds(table.metadata.location)
        own_bounds = self.own_bounds(table.metadata.location)
        bind(table.io, name, bounds, own=own_bounds, metadata_location=table.metadata_location)
        return table

    def bounds(self, location: str) -> Bounds:
        """Return where files of a table at `location` may lie."""
        return bounds_of(
            location, warehouse=self.rules.warehouse, extra_places=self.rules.extra_places
        )

    def own_bounds(self, location: str) -> Bounds:
        """Return the places of the table's own files, to be deleted with the table."""
        return bounds_of(location, warehouse=self.rules.warehouse, extra_places=())

    # -- how pyiceberg makes them ----------------------------------------------------------------

    def _load_file_io(self, properties: Any = None, location: str | None = None) -> FileIO:
        del properties  # They are a table's.
        return load_file_io(dict(self.properties), location)

    def _create_staged_table(
        self, identifier: Any, schema: Any, location: str | None = None, *args: Any, **named: Any
    ) -> StagedTable:
        properties = named.get("properties", args[2] if len(args) > 2 else {})
        free = self._new_location(identifier, location, properties)
        above = _of(super())
        staged: StagedTable = above._create_staged_table(identifier, schema, free, *args, **named)
        return self.admitted(staged)

    def create_table(
        self, identifier: Any, schema: Any, location: str | None = None, *args: Any, **named: Any
    ) -> Table:
        properties = named.get("properties", args[2] if len(args) > 2 else {})
        free = self._new_location(identifier, location, properties)
        above = _of(super())
        created: Table = above.create_table(identifier, schema, free, *args, **named)
        return created

    def _update_and_stage_table(
        self,
        current_table: Table | None,
        table_identifier: Identifier,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> StagedTable:
        base = None if current_table is None else self.admitted(current_table)
        check_updates(table_identifier, base, updates)
        if base is None:
            locations = [u.location for u in updates if isinstance(u, SetLocationUpdate)]
            self.check_new_location(table_identifier, locations[-1] if locations else "")
        above = _of(super())
        staged: StagedTable = above._update_and_stage_table(
            base, table_identifier, requirements, applicable(updates)
        )
        return self.admitted(staged)

    @staticmethod
    def _write_metadata(metadata: TableMetadata, io: FileIO, metadata_path: str) -> None:
        write_metadata(metadata, io.new_output(metadata_path))

    def commit_table(
        self,
        table: Table,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> CommitTableResponse:
        check_updates(table.name(), None if isinstance(table, StagedTable) else table, updates)
        above = _of(super())
        landed: CommitTableResponse = above.commit_table(table, requirements, updates)
        # The answer is the table from now on: others may have written to it as well.
        metadata = _scrubbed(".".join(table.name()), landed.metadata)
        return landed.model_copy(update={"metadata": metadata})

    @staticmethod
    def _delete_old_metadata(io: FileIO, base: TableMetadata, metadata: TableMetadata) -> None:
        own_paths = set(only_own(io, (entry.metadata_file for entry in base.metadata_log)))
        log = [entry for entry in base.metadata_log if entry.metadata_file in own_paths]
        Catalog._delete_old_metadata(io, base.model_copy(update={"metadata_log": log}), metadata)

    # -- names and namespaces --------------------------------------------------------------------

    def create_namespace(self, namespace: Any, properties: Any = None) -> None:
        for part in Catalog.identifier_to_tuple(namespace):
            check_lake_name(part, what="namespace")
        check_namespace(self, properties or {})
        _of(super()).create_namespace(namespace, properties or {})

    def drop_table(self, identifier: Any) -> None:
        _of(super()).drop_table(identifier)
        self.rules.approved.pop(Catalog.identifier_to_tuple(identifier), None)

    def rename_table(self, from_identifier: Any, to_identifier: Any) -> Table:
        _check_new_name(Catalog.identifier_to_tuple(to_identifier))
        self.rules.approved.pop(Catalog.identifier_to_tuple(from_identifier), None)
        renamed: Table = _of(super()).rename_table(from_identifier, to_identifier)
        return renamed

    # -- places ----------------------------------------------------------------------------------

    def _new_location(
        self, identifier: Any, location: str | None, properties: Mapping[str, str]
    ) -> str | None:
        """Return where a new table shall lie; raises `ForbiddenError` where it must not."""
        name = Catalog.identifier_to_tuple(identifier)
        _check_new_name(name)
        check_properties(f"lake table '{'.'.join(name)}'", properties)
        if location is None and isinstance(self, MetastoreCatalog):
            location = self._default_location(name)
            place = location_of(location, self.rules.warehouse, is_new=True)
            if any(place.may_overlap(taken_place) for taken_place in self._taken_places(name)):
                # A table renamed away from this name, or a table of another engine, has the place.
                location = f"{location.rstrip('/')}-{uuid.uuid4().hex[:8]}"
        if location is not None:
            self.check_new_location(name, location)
        return location

    def check_new_location(self, identifier: Identifier, location: str) -> None:
        """Raise `ForbiddenError` unless a new table may have this place, and reserve the place."""
        _check_new_name(identifier)
        where = f"lake table '{'.'.join(identifier)}'"
        if not location:
            raise ForbiddenError(f"{where} has no location")
        try:
            place = location_of(location, self.rules.warehouse, is_new=True)
        except ForbiddenError as error:
            raise ForbiddenError(f"{where}: location: {error.message}") from None
        if not _is_below(place, self.rules.roots) and not _is_below(
            place, [self._proposed_folder(identifier)]
        ):
            raise ForbiddenError(
                f"{where}: location '{location[:300]}' does not lie below the warehouse; leave it"
                f" out, or let the operator name the place in {LAKE_PATHS_PROPERTY}"
            )
        self._check_no_namespace(where, identifier, place)
        self.check_outside_data_directory(where, place)
        with self.rules.lock:
            now_s = time.monotonic()
            approved = self.rules.approved
            for approved_name, (taken_place, since) in list(approved.items()):
                if now_s - since > _APPROVED_S:
                    del approved[approved_name]
                elif approved_name != identifier and place.may_overlap(taken_place):
                    raise ForbiddenError(_OVERLAP.format(where, location[:300]))
            approved[identifier] = (place, now_s)
        if any(place.may_overlap(taken_place) for taken_place in self._taken_places(identifier)):
            raise ForbiddenError(_OVERLAP.format(where, location[:300]))

    def make_local_folders(self, location: str) -> None:
        """Make the folders of a staged table that lies on this machine.

        DuckDB writes the files of a new table itself, and makes no folder for them.
        """
        place = location_of(location, self.rules.warehouse, is_new=True)
        if place.store == FILE:
            for folder in ("data", "metadata"):
                Path(place.local_path, folder).mkdir(parents=True, exist_ok=True)

    def _check_no_namespace(self, where: str, identifier: Identifier, place: Place) -> None:
        """Raise `ForbiddenError` for the folder of a namespace's tables, present or future.

        A table in the folder could keep every table of the namespace from being created.
        """
        warehouse = self.rules.warehouse
        if warehouse is None:
            return
        in_warehouse = warehouse.place.real() in (place.parent.real(), place.real().parent)
        foreign_places = [*self.rules.extra_places, self._proposed_folder(identifier)]
        if in_warehouse and not _is_below(place, foreign_places):
            raise ForbiddenError(
                f"{where}: its location must not be a folder of the warehouse itself, because the"
                " tables of a namespace go there; leave it out, or choose a folder in one of those"
            )

    def check_outside_data_directory(self, where: str, place: Place) -> None:
        """Raise `ForbiddenError` for a place inside, or around, the service's own data."""
        data = self.rules.data_directory
        if data is None or not place.may_overlap(data):
            return
        warehouse = None if self.rules.warehouse is None else self.rules.warehouse.place
        # The default warehouse is inside the data directory.
        if (
            warehouse is None
            or warehouse.really_contains(data)
            or not _is_below(place, [warehouse])
        ):
            raise ForbiddenError(f"{where}: its location must not touch the data directory")

    def is_in_roots(self, identifier: Identifier, place: Place) -> bool:
        """Whether an existing table lies below the roots for tables of this catalog."""
        return _is_below(place, self.rules.roots) or _is_below(
            place, [self._proposed_folder(identifier)]
        )

    @property
    def knows_places(self) -> bool:
        """Whether `other_places` needs a single request."""
        return hasattr(self, "metadata_locations")

    def other_places(self, identifier: Identifier) -> list[Place]:
        """Return the places of the other tables in the catalog."""
        return list(self._taken_places(identifier))

    def _proposed_folder(self, identifier: Identifier) -> Place | None:
        """Return the folder in which the catalog itself would put a table of that name."""
        try:
            if isinstance(self, MetastoreCatalog):
                proposed = self._default_location(identifier)
            else:
                # Of the name itself there may be a table.
                sibling = (*identifier[:-1], f"{identifier[-1]}_{uuid.uuid4().hex[:8]}")
                staged = cast(Catalog, self).create_table_transaction(sibling, Schema())
                proposed = staged._table.metadata.location
            return location_of(proposed, self.rules.warehouse, is_new=False).parent
        except Exception:  # noqa: BLE001 - a catalog that proposes nothing has no such folder
            return None

    def _default_location(self, identifier: Identifier) -> str:
        namespace = Catalog.namespace_to_string(Catalog.namespace_from(identifier))
        location: str = _of(self)._resolve_table_location(None, namespace, identifier[-1])
        return location

    def _taken_places(self, but: Identifier) -> Iterator[Place]:
        located = getattr(self, "metadata_locations", None)
        if located is None:
            yield from self._listed_places(but)
            return
        for identifier, metadata_location in located().items():
            if identifier != but:
                place = self._table_of_metadata(metadata_location)
                place = place or self._loaded_place(identifier)
                if place is not None:
                    yield place

    def _table_of_metadata(self, metadata_location: str) -> Place | None:
        """Return the table's place if its metadata lies in the usual folder, else None."""
        try:
            folder = location_of(metadata_location, self.rules.warehouse, is_new=False).parent
        except ForbiddenError:
            return None
        return folder.parent if folder.segments[-1:] == (_METADATA_FOLDER,) else None

    def _listed_places(self, but: Identifier) -> Iterator[Place]:
        cached_places = self.rules.cached_places
        listed = set(_all_tables(cast(Catalog, self)))
        for gone in cached_places.keys() - listed:
            cached_places.pop(gone, None)
        for identifier in listed - {but}:
            if identifier not in cached_places:
                place = self._loaded_place(identifier)
                if place is None:
                    continue
                cached_places[identifier] = place
            yield cached_places[identifier]

    def _loaded_place(self, identifier: Identifier) -> Place | None:
        try:
            location = self.load_table(identifier).metadata.location
            return location_of(location, self.rules.warehouse, is_new=False)
        except (NoSuchTableError, CorruptDataError, ForbiddenError):
            return None


_OVERLAP: Final = (
    "{}: location '{}' is, or is in or around, that of another lake table; leave the location out,"
    " or choose another"
)


def _of(catalog: object) -> Any:
    """Return a guarded catalog, or a wrapper of one, typed with all of its methods."""
    return catalog


class _GuardedRest(GuardedCatalog):
    """Of a REST catalog: it proposes where tables lie, and may vend how their files are opened."""

    __slots__ = ()

    def _response_to_table(self, identifier_tuple: Identifier, table_response: Any) -> Table:
        above = _of(super())._response_to_table
        table: Table = self._of_response(above, identifier_tuple, table_response)
        return table

    def _response_to_staged_table(
        self, identifier_tuple: Identifier, table_response: Any
    ) -> StagedTable:
        above = _of(super())._response_to_staged_table
        table: StagedTable = self._of_response(above, identifier_tuple, table_response)
        return table

    def _of_response(self, above: Any, identifier: Identifier, response: Any) -> Any:
        metadata = response.metadata
        config = {k: v for k, v in response.config.items() if k not in _CODE}
        bare = metadata.model_copy(update={"properties": {}})
        table = above(identifier, response.model_copy(update={"metadata": bare, "config": config}))
        table.metadata = metadata
        return self.admitted(table)

    def _load_file_io(self, properties: Any = None, location: str | None = None) -> FileIO:
        # The properties are the server's vended ones here, no longer the table's.
        file_io: FileIO = _of(super(GuardedCatalog, self))._load_file_io(properties or {}, location)
        return file_io

    def create_table_transaction(
        self, identifier: Any, schema: Any, location: str | None = None, *args: Any, **named: Any
    ) -> CreateTableTransaction:
        properties = named.get("properties", args[2] if len(args) > 2 else {})
        table_location = self._new_location(identifier, location, properties)
        above = _of(super())
        transaction: CreateTableTransaction = above.create_table_transaction(
            identifier, schema, table_location, *args, **named
        )
        return transaction


@functools.lru_cache(maxsize=32)
def _guarded_class(kind: type[Catalog]) -> type[Catalog]:
    guard = _GuardedRest if hasattr(kind, "_response_to_table") else GuardedCatalog
    return type(kind.__name__, (guard, kind), {"__module__": kind.__module__})


def guarded(
    catalog: Catalog,
    properties: Mapping[str, str],
    *,
    data_directory: str | None = None,
) -> Catalog:
    """Make `catalog`, which was opened with `properties`, keep the policy; return it.

    `data_directory` is the service's own, in which no table may lie.
    """
    if hasattr(catalog, "_fetch_config"):
        # A REST server may say much of itself, but not which code is loaded for it.
        configured = {**(_ENV_CONFIG.get_catalog_config(catalog.name) or {}), **properties}
        safe_properties = {
            k: v for k, v in catalog.properties.items() if k not in _CODE or k in configured
        }
        catalog.properties = safe_properties | {
            k: str(configured[k]) for k in _CODE if k in configured
        }
    warehouse = catalog.properties.get(WAREHOUSE_LOCATION)
    if not isinstance(catalog, GuardedCatalog):
        catalog.__class__ = _guarded_class(type(catalog))
    _of(catalog).rules = _Rules(
        warehouse=Warehouse.parse(warehouse),
        extra_places=places_of(properties.get(LAKE_PATHS_PROPERTY, "")),
        data_directory=None if data_directory is None else place_of(data_directory),
    )
    return catalog


def guard_of(catalog: Catalog) -> GuardedCatalog:
    """Return `catalog` with the policy enforced, unchanged if guarded already."""
    if not isinstance(catalog, GuardedCatalog):
        guarded(catalog, catalog.properties)
    return cast(GuardedCatalog, catalog)


def check_updates(
    identifier: Identifier, base: Table | None, updates: Sequence[TableUpdate]
) -> None:
    """Refuse properties and a location against the policy, before any effect."""
    where = f"lake table '{'.'.join(identifier)}'"
    for update in updates:
        if isinstance(update, SetPropertiesUpdate):
            check_properties(where, update.updates)
        elif base is None:
            continue
        elif isinstance(update, SetLocationUpdate):
            base_location = base.metadata.location
            if update.location.rstrip("/") != base_location.rstrip("/"):
                raise ForbiddenError(
                    f"{where}: its location must stay '{base_location}', below which all its"
                    " files lie"
                )
        elif isinstance(update, AddSnapshotUpdate):
            cast(Any, base.io).check(update.snapshot.manifest_list)


def check_namespace(catalog: Catalog, properties: Mapping[str, str]) -> None:
    """Refuse forbidden properties of a namespace, and a location outside the warehouse."""
    table_properties = {name: value for name, value in properties.items() if name != _LOCATION}
    check_properties("namespace", table_properties)
    location = properties.get(_LOCATION)
    if location is None:
        return
    guard = guard_of(catalog)
    place = location_of(location, guard.rules.warehouse, is_new=True)
    roots = guard.rules.roots
    if not any(root.really_contains(place) for root in roots):
        raise ForbiddenError(
            f"namespace: location '{location[:300]}' does not lie below the warehouse; leave it"
            f" out, or let the operator name the place in {LAKE_PATHS_PROPERTY}"
        )
    guard.check_outside_data_directory("namespace", place)


@contextlib.contextmanager
def unreadable_metadata(where: str) -> Iterator[None]:
    """Raise the refusal of a metadata file as `CorruptDataError`, without any text of the file.

    A type of format version 3 that the library does not know is `UnsupportedError`.
    """
    try:
        yield
    except (
        ValidationError,
        InvalidModelError,
        json.JSONDecodeError,
        UnicodeDecodeError,
        zlib.error,
        EOFError,
        KeyError,
        RecursionError,
    ) as error:
        if (unparsed := _UNPARSED_TYPE.search(str(error))) is not None:
            raise UnsupportedError(
                f"{where}: it has a column of type {unparsed[1]}, which Streamhouse does not read;"
                " copy the table without the column, with the engine that wrote it"
            ) from None
        # No cause either: its text has bytes of the file.
        raise CorruptDataError(
            f"{where}: its metadata file is not what Iceberg's metadata looks like"
        ) from None


def _check_new_name(identifier: Identifier) -> None:
    for part in identifier[:-1]:
        check_lake_name(part, what="namespace")
    check_lake_name(identifier[-1], what="table")


def _scrubbed(name: str, metadata: TableMetadata) -> TableMetadata:
    properties, dropped = kept_properties(metadata.properties)
    if not dropped:
        return metadata
    key = (str(metadata.table_uuid), dropped)
    if key not in _warned and len(_warned) < _WARNED_MAX:
        _warned.add(key)
        _logger.warning(
            "event=lake_properties_dropped table=%s properties=%s"
            " why='a lake table must not say that'",
            *(name, ",".join(dropped)[:500]),
        )
    return metadata.model_copy(update={"properties": properties})


def _is_below(place: Place, roots: Sequence[Place | None]) -> bool:
    real = place.real()
    return any(r is not None and r.real() != real and r.real().contains(real) for r in roots)


def _all_tables(catalog: Catalog) -> Iterator[Identifier]:
    waiting = list(catalog.list_namespaces())
    while waiting:
        namespace = waiting.pop()
        yield from catalog.list_tables(namespace)
        with contextlib.suppress(NotImplementedError, ValueError):
            waiting += [n for n in catalog.list_namespaces(namespace) if n != namespace]
