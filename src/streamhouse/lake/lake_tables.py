"""The lake tables of a service in an Iceberg catalog: found, created, or refused by name."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final
from uuid import UUID

from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
from pyiceberg.table import Table
from requests import Timeout

from streamhouse.core.errors import (
    AlreadyExistsError,
    NotFoundError,
    StreamhouseError,
)
from streamhouse.core.model.lake.facts import (
    SERVICE_ID_PROPERTY,
    LakeCatalog,
    LakeRole,
    LakeState,
    SideLakeState,
)
from streamhouse.core.model.table import TableInfo
from streamhouse.core.secret_sources import withheld_explained
from streamhouse.lake._landing import pause
from streamhouse.lake.catalogs._sql_catalog import open_catalog
from streamhouse.lake.commits.committer import IcebergLakeTable
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.iceberg_errors import lake_errors
from streamhouse.lake.snapshots.live_files import LiveFilesCache
from streamhouse.lake.tables._creation import create_lake_table, lake_identifier
from streamhouse.lake.tables._evolution import evolve

__all__ = ["IcebergLake"]

_logger = logging.getLogger(__name__)

OPEN_ATTEMPTS_MAX: Final = 4
TABLES_REMEMBERED_MAX: Final = 256


class IcebergLake:
    """The lake tables of a service, in a catalog; each table is used by a thread at a time.

    `opened` is the catalog if it is open already.
    """

    def __init__(self, catalog: LakeCatalog, *, opened: Catalog | None = None) -> None:
        self._lock = threading.Lock()
        self._described = catalog
        self._catalog = opened
        # A borrowed one may keep its changes to itself: the log does not tell them.
        self._is_own_catalog = opened is None
        # By lake table: a long-lived worker reads each manifest once.
        self._live_files: OrderedDict[UUID, LiveFilesCache] = OrderedDict()

    @property
    def file_properties(self) -> Mapping[str, str]:
        """The catalog's properties; those of opening files are among them."""
        return self._described.properties

    def close(self) -> None:
        """Close the catalog's connections."""
        if self._catalog is not None:
            self._catalog.close()
            self._catalog = None

    def open_or_create(
        self,
        table: TableInfo,
        state: LakeState | SideLakeState | None,
        *,
        role: LakeRole = LakeRole.ROWS,
    ) -> IcebergLakeTable:
        """Return the lake table of `table`, created if the table was never tiered.

        `state` is the service's record of the lake table.

        Raises:
            AlreadyExistsError: another table has the name in the catalog.
            NotFoundError: the table was tiered, but the catalog lacks the lake table.
            UnavailableError: the catalog cannot be reached.
        """
        identifier = lake_identifier(table, role=role)
        owner_property = role.owner_property
        doing = f"open lake table '{'.'.join(identifier)}'"
        with withheld_explained(self._described.properties), lake_errors(doing):
            lake_table = self._load_or_create(table, state, role=role)
        self._check_owner(lake_table, table, state, owner_property)
        return IcebergLakeTable(
            lake_table,
            table,
            files=LakeFilesystem(self.file_properties),
            live_files=self._live_files_of(lake_table),
            role=role,
            registered=None if state is None else state.snapshot_id,
        )

    def _live_files_of(self, found: Table) -> LiveFilesCache:
        uuid = found.metadata.table_uuid
        with self._lock:
            cache = self._live_files.setdefault(uuid, LiveFilesCache())
            self._live_files.move_to_end(uuid)
            while len(self._live_files) > TABLES_REMEMBERED_MAX:
                self._live_files.popitem(last=False)
            return cache

    def _load_or_create(
        self, table: TableInfo, state: LakeState | SideLakeState | None, *, role: LakeRole
    ) -> Table:
        identifier = lake_identifier(table, role=role)
        owner_property = role.owner_property
        for attempt in range(OPEN_ATTEMPTS_MAX):
            try:
                catalog = self._open_catalog()
                service_id = self._service_id
                try:
                    lake_table = catalog.load_table(identifier)
                    if not self._is_of_a_dropped_table(lake_table, table, owner_property):
                        if self._is_of(lake_table, table, owner_property):
                            evolve(lake_table, table, role=role)
                        return lake_table
                    self._put_aside(catalog, lake_table, owner_property)
                    # A clean-up of one table's folder must not reach the other table's files.
                    suffix = f"-{table.table_id}"
                    return create_lake_table(
                        catalog,
                        table,
                        service_id=service_id,
                        folder_suffix=suffix,
                        role=role,
                    )
                except (NoSuchTableError, NoSuchNamespaceError):
                    if state is not None and state.snapshot_id is not None:
                        raise self._not_found(identifier, state.snapshot_id, role) from None
                    return create_lake_table(catalog, table, service_id=service_id, role=role)
            except StreamhouseError:
                raise
            except Exception as error:  # each kind of catalog says "collided" differently
                # Workers that start together on a new catalog collide in the catalog's own tables,
                # the namespace, the lake table: the object of the collision exists a moment later.
                if attempt + 1 == OPEN_ATTEMPTS_MAX or isinstance(error, Timeout):
                    raise
                pause(attempt + 1)
        raise AssertionError("unreachable")

    def _not_found(
        self, identifier: tuple[str, str], snapshot_id: int, role: LakeRole
    ) -> NotFoundError:
        where = f"lake table '{'.'.join(identifier)}' is not in catalog '{self._described.name}'"
        if role is LakeRole.BATCH:
            return NotFoundError(f"{where}: the next round that has rows for it makes it anew")
        return NotFoundError(
            f"{where}, but rows were tiered to it (snapshot {snapshot_id}): restore it, or use the"
            " catalog it is in"
        )

    def _open_catalog(self) -> Catalog:
        with self._lock:
            if self._catalog is None:
                self._catalog = open_catalog(self._described)
            return self._catalog

    @property
    def _service_id(self) -> str:
        return self._described.properties.get(SERVICE_ID_PROPERTY, "")

    def _is_of_a_dropped_table(self, found: Table, table: TableInfo, owner_property: str) -> bool:
        """Whether an earlier table of this service and name left its lake table behind."""
        properties = found.metadata.properties
        is_this_services = self._service_id and (
            properties.get(SERVICE_ID_PROPERTY) == self._service_id
        )
        # Ids are never reused and grow: a smaller one under the same name was dropped.
        owner = int(properties.get(owner_property, "0"))
        return bool(is_this_services and owner < table.table_id)

    def _is_of(self, found: Table, table: TableInfo, owner_property: str) -> bool:
        return found.metadata.properties.get(owner_property) == str(table.table_id)

    def _put_aside(self, catalog: Catalog, found: Table, owner_property: str) -> None:
        """Rename the lake table of a dropped table; its rows stay readable under the new name."""
        namespace, name = found.name()
        aside = f"{name}__dropped_{found.metadata.properties[owner_property]}"
        catalog.rename_table((namespace, name), (namespace, aside))
        if self._is_own_catalog:
            _logger.warning(
                "event=lake_table_put_aside lake_table=%s.%s new_name=%s.%s"
                " why='it holds rows of a table that was dropped'",
                *(namespace, name, namespace, aside),
            )

    def _check_owner(
        self,
        found: Table,
        table: TableInfo,
        state: LakeState | SideLakeState | None,
        owner_property: str,
    ) -> None:
        owner = found.metadata.properties.get(owner_property)
        where = f"lake table '{'.'.join(found.name())}' in catalog '{self._described.name}'"
        if owner is None:
            raise AlreadyExistsError(
                f"{where} was not made by Streamhouse: rename it, or the streamhouse table"
            )
        if owner != str(table.table_id):
            raise AlreadyExistsError(
                f"{where} holds the rows of another streamhouse table (id {owner}, this one has id"
                f" {table.table_id}), probably another service's: rename or drop the lake table in"
                " the catalog, or use another catalog"
            )
        uuid = str(found.metadata.table_uuid)
        if state is not None and state.table_uuid not in (None, uuid):
            raise AlreadyExistsError(
                f"{where} is not the one that was tiered to before (uuid {uuid} instead of"
                f" {state.table_uuid}): restore that one, or use the catalog it is in"
            )
