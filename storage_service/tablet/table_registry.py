"""Which databases and tables exist, durably.

Invariants:
- every change is on disk before a method returns, and happens as a whole or not at all; only after
  an UnknownOutcomeError does the next start tell which
- a table id is used once, also across crashes: the next id is durable before an id is used
- a table exists exactly while its `table.json` is in a directory named by its id alone; of several
  for one path (a creation or drop that the disk failed) the latest is the table
Logs and lake state are others' files in the same directory. One caller at a time (the manager).
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from streamhouse.storage_service.errors import (
    CorruptDataError,
    DatabaseExistsError,
    DatabaseNotEmptyError,
    DatabaseNotFoundError,
    InvalidRequestError,
    RequestTooLargeError,
    StorageFailedError,
    StreamhouseError,
    TableExistsError,
    TableNotFoundError,
    UnsupportedError,
    suggestion,
)
from streamhouse.storage_service.model.merge_engine import is_merge_property
from streamhouse.storage_service.model.partitioning import PartitionField
from streamhouse.storage_service.model.properties import (
    IMPORT_SOURCE_PROPERTY,
    PROPERTY_HELP,
    TableProperties,
)
from streamhouse.storage_service.model.schema_change import change_schema
from streamhouse.storage_service.model.table import (
    DEFAULT_DATABASE,
    TableDescriptor,
    TableInfo,
    TablePath,
    check_name,
)
from streamhouse.storage_service.tablet.damaged_table import DamagedTable
from streamhouse.storage_service.tablet.data_directory import (
    DROPPED_SUFFIX,
    GIVEN_UP_SUFFIX,
    DataDirectory,
)
from streamhouse.storage_service.tablet.durable_json import (
    read_json,
    replace_json,
    sync_directory,
)

__all__ = ["TableRegistry"]

FORMAT_VERSION: Final = 1
# A history that began later would not be the full one, nor would an import know what it has.
_FIXED_PROPERTIES: Final = ("table.datalake.changelog", IMPORT_SOURCE_PROPERTY)


class TableRegistry:
    """The databases and tables of one data directory."""

    def __init__(
        self, directory: DataDirectory, *, databases_max: int, tables_max: int, buckets_max: int
    ) -> None:
        self._directory = directory
        self._databases_max = databases_max
        self._tables_max = tables_max
        self._buckets_max = buckets_max
        self._databases: set[str] = {DEFAULT_DATABASE}
        self._tables: dict[TablePath, TableInfo] = {}
        self._damaged: dict[TablePath, DamagedTable] = {}
        self._next_table_id = 1
        self.service_id = uuid.uuid4().hex
        if directory.service_file.exists():
            self._load()
        elif any(directory.tables.iterdir()):
            raise CorruptDataError(f"{directory.path} has tables but no service.json")
        else:
            self._save()

    def databases(self) -> list[str]:
        """The names of all databases, sorted."""
        return sorted(self._databases)

    def tables(self, database: str | None = None) -> list[TableInfo]:
        """All tables, or those of one database, sorted by path."""
        if database is not None:
            self._check_database(database)
        return [
            info
            for path, info in sorted(self._tables.items())
            if database is None or path.database == database
        ]

    def paths(self, database: str | None = None) -> list[TablePath]:
        """The paths of all tables, or of one database's, sorted; damaged ones too."""
        if database is not None:
            self._check_database(database)
        known = {*self._tables, *self._damaged}
        return sorted(path for path in known if database is None or path.database == database)

    def damaged(self) -> list[DamagedTable]:
        """The tables that cannot be served, sorted by path."""
        return [damaged for _, damaged in sorted(self._damaged.items())]

    def set_damaged(self, damaged: DamagedTable) -> None:
        """Keep a table out of use until the next start; it stays as it is on disk."""
        self._tables.pop(damaged.path, None)
        self._damaged[damaged.path] = damaged

    def table(self, path: TablePath) -> TableInfo:
        """Return the table.

        Raises `DatabaseNotFoundError`, `TableNotFoundError` or `TableDamagedError`.
        """
        if path in self._damaged:
            raise self._damaged[path].error()
        info = self._tables.get(path)
        if info is None:
            self._check_database(path.database)
            raise self.not_found(path)
        return info

    def not_found(self, path: TablePath) -> TableNotFoundError:
        """Return the error for a table that does not exist."""
        others = [str(other) for other in self.paths() if other != path]
        return TableNotFoundError(f"table '{path}' does not exist{suggestion(str(path), others)}")

    def create_database(self, name: str) -> None:
        """Create a database."""
        check_name("database", name)
        if name in self._databases:
            raise DatabaseExistsError(f"database '{name}' already exists")
        if len(self._databases) >= self._databases_max:
            raise RequestTooLargeError(
                f"database '{name}': the service has its limit of {self._databases_max} databases"
            )
        self._databases.add(name)
        try:
            self._save()
        except StorageFailedError:
            self._databases.discard(name)
            raise

    def drop_database(self, name: str) -> None:
        """Drop an empty database; `default` stays."""
        self._check_database(name)
        if name == DEFAULT_DATABASE:
            raise InvalidRequestError(f"database '{DEFAULT_DATABASE}' cannot be dropped")
        if tables := self.paths(name):
            raise DatabaseNotEmptyError(
                f"database '{name}' still has {len(tables)} tables, such as '{tables[0]}';"
                " drop them first"
            )
        self._databases.discard(name)
        try:
            self._save()
        except StorageFailedError:
            self._databases.add(name)
            raise

    def create_table(self, descriptor: TableDescriptor, *, created_at_us: int) -> TableInfo:
        """Create a table under a new id."""
        self.check_new(descriptor)
        info = TableInfo(
            descriptor=descriptor,
            table_id=self.reserve_table_id(),
            created_at_us=created_at_us,
            nodes=dict.fromkeys(range(descriptor.bucket_count), ""),
        )
        self.add_table(info)
        return info

    def check_new(self, descriptor: TableDescriptor) -> None:
        """Raise unless such a table could be created now."""
        path = descriptor.path
        self._check_database(path.database)
        if path in self._damaged:
            raise TableExistsError(f"table '{path}' already exists, and is damaged")
        if path in self._tables:
            raise TableExistsError(f"table '{path}' already exists")
        self._check_limits(descriptor)

    def reserve_table_id(self, *, above: int = 0) -> int:
        """Return an id that was never used, and above another one; it never will be again."""
        table_id = max(self._next_table_id, above + 1)
        self._next_table_id = table_id + 1
        self._save()
        return table_id

    def add_table(
        self, info: TableInfo, *, fill: Callable[[TableInfo], None] = lambda _: None
    ) -> None:
        """Create a table under its reserved id; `fill` puts files into its directory before."""
        path, table_id = info.path, info.table_id
        try:
            self._directory.table(table_id).mkdir()
            fill(info)
            replace_json(self._directory.table_file(table_id), info.to_json())
            sync_directory(self._directory.tables)
        except OSError as error:
            self._remove_files(table_id)
            raise StorageFailedError(f"cannot create table '{path}': {error.strerror}") from error
        except StreamhouseError:
            self._remove_files(table_id)
            raise
        self._tables[path] = info

    def withdraw_table(self, info: TableInfo) -> None:
        """Forget a table that was just created and that nobody has seen."""
        del self._tables[info.path]
        self._remove_files(info.table_id)

    def _remove_files(self, table_id: int) -> None:
        """Delete what is there of a table; what cannot be is no table once another has its path."""
        with contextlib.suppress(OSError):
            self._directory.table(table_id).rename(self._directory.dropped(table_id))
            self.purge(table_id)

    def alter_properties(
        self, path: TablePath, *, updates: Mapping[str, str], removals: Sequence[str]
    ) -> TableInfo:
        """Set and remove properties together; raises and changes nothing if any is wrong."""
        return self.keep(self.with_properties(path, updates=updates, removals=removals))

    def keep(self, changed: TableInfo) -> TableInfo:
        """Take the place of a table by the same table, changed."""
        replace_json(self._directory.table_file(changed.table_id), changed.to_json())
        self._tables[changed.path] = changed
        return changed

    def with_properties(
        self, path: TablePath, *, updates: Mapping[str, str], removals: Sequence[str]
    ) -> TableInfo:
        """Return what a table would be with other properties; raises if any of them is wrong."""
        info = self.table(path)
        for key in (*updates, *removals):
            if is_merge_property(key) or key in _FIXED_PROPERTIES:
                raise UnsupportedError(
                    f"table '{path}': property {key} is fixed when the table is created"
                )
        properties = {**info.descriptor.properties, **updates}
        for key in removals:
            if key not in PROPERTY_HELP:
                # Raises with the suggestion, as for a misspelt property to set.
                TableProperties.parse({key: ""}, table=str(path))
        for key in removals:
            properties.pop(key, None)
        return replace(info, descriptor=replace(info.descriptor, properties=properties))

    def alter_schema(self, path: TablePath, changes: Sequence[Mapping[str, Any]]) -> TableInfo:
        """Change the schema; raises and changes nothing if any change is wrong."""
        return self.keep(change_schema(self.table(path), changes))

    def alter_partitioning(self, path: TablePath, partitioned_by: Sequence[str]) -> TableInfo:
        """Change the lake partitioning of rows to come; raises if an expression is wrong."""
        info = self.table(path)
        fields = tuple(PartitionField.parse(text) for text in partitioned_by)
        return self.keep(replace(info, descriptor=replace(info.descriptor, partitioned_by=fields)))

    def drop_table(self, path: TablePath) -> TableInfo:
        """Drop the table; its files wait for `purge`, which the next start does after a crash."""
        info = self.table(path)
        try:
            self._directory.table(info.table_id).rename(self._directory.dropped(info.table_id))
            del self._tables[path]
            sync_directory(self._directory.tables)
        except OSError as error:
            raise StorageFailedError(f"cannot drop table '{path}': {error.strerror}") from error
        return info

    def drop_damaged(self, path: TablePath) -> None:
        """Drop a damaged table; its files stay, beside those of the tables."""
        damaged = self._damaged.get(path)
        if damaged is None:
            raise InvalidRequestError(f"table '{self.table(path).path}' is not damaged: drop it")
        target = self._directory.given_up(damaged.table_id)
        try:
            self._directory.table(damaged.table_id).rename(target)
            del self._damaged[path]
            sync_directory(self._directory.tables)
        except OSError as error:
            raise StorageFailedError(f"cannot drop table '{path}': {error.strerror}") from error

    def set_aside(self, path: TablePath) -> None:
        """Let a table be one no more, because another takes its place; its files stay."""
        info = self.table(path)
        try:
            self._directory.table(info.table_id).rename(self._directory.given_up(info.table_id))
            del self._tables[path]
            sync_directory(self._directory.tables)
        except OSError as error:
            raise StorageFailedError(f"cannot set '{path}' aside: {error.strerror}") from error

    def purge(self, table_id: int) -> None:
        """Delete the files of a dropped table."""
        shutil.rmtree(self._directory.dropped(table_id), ignore_errors=True)

    def _check_database(self, name: str) -> None:
        if name not in self._databases:
            raise DatabaseNotFoundError(
                f"database '{name}' does not exist{suggestion(name, self.databases())}"
            )

    def _check_limits(self, descriptor: TableDescriptor) -> None:
        if len(self._tables) + len(self._damaged) >= self._tables_max:
            raise RequestTooLargeError(
                f"table '{descriptor.path}': the service has its limit of {self._tables_max} tables"
            )
        buckets = sum(info.bucket_count for info in self._tables.values())
        if buckets + descriptor.bucket_count > self._buckets_max:
            raise RequestTooLargeError(
                f"table '{descriptor.path}': {descriptor.bucket_count} buckets more than the"
                f" {buckets} that exist exceed the service's limit of {self._buckets_max}"
            )

    def _save(self) -> None:
        replace_json(
            self._directory.service_file,
            {
                "format": FORMAT_VERSION,
                "service_id": self.service_id,
                "next_table_id": self._next_table_id,
                "databases": self.databases(),
            },
        )

    def _load(self) -> None:
        path = self._directory.service_file
        value = read_json(path)
        if value.get("format") != FORMAT_VERSION:
            raise CorruptDataError(
                f"{path}: format {value.get('format')!r} is not {FORMAT_VERSION}; this data"
                " directory belongs to another version of Streamhouse"
            )
        self.service_id = str(value["service_id"])
        self._next_table_id = int(value["next_table_id"])
        self._databases = {DEFAULT_DATABASE, *map(str, value["databases"])}
        for directory in sorted(self._directory.tables.iterdir(), key=_table_id_of):
            if directory.name.endswith(GIVEN_UP_SUFFIX):
                continue
            if directory.name.endswith(DROPPED_SUFFIX) or not (directory / "table.json").exists():
                # Dropped, or its creation was cut off by a crash: either way it is no table.
                shutil.rmtree(directory)
                continue
            info = TableInfo.from_json(read_json(directory / "table.json"))
            if directory.name != str(info.table_id) or info.table_id >= self._next_table_id:
                raise CorruptDataError(f"{directory}: its table.json is of table {info.table_id}")
            older = self._tables.get(info.path)
            if older is not None:
                # Its creation failed and its files could not be deleted, or its drop was undone by
                # a crash: else there would be no later one.
                shutil.rmtree(self._directory.table(older.table_id))
            self._tables[info.path] = info


def _table_id_of(directory: Path) -> int:
    number = directory.name.removesuffix(DROPPED_SUFFIX)
    return int(number) if number.isdecimal() else -1
