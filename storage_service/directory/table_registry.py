"""The table registry: databases and tables, on disk.

Invariants:
- every change is on disk before a method returns, and happens as a whole or not at all; only after
  an UnknownOutcomeError the next start decides
- a table id is used once, also across crashes: the next id is durable before an id is used
- a table exists exactly while service.json names the table: a replacement of the file creates or
  drops the table. A named table with a missing, damaged or old file is damaged, not gone
- with several shards, the shard directory holds a table's name before service.json names the
  table, and until service.json no longer names it
Logs and lake state belong to other modules. One caller at a time (the manager).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from streamhouse.core.errors import (
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
    UnavailableError,
    UnsupportedError,
    suggestion,
)
from streamhouse.core.model.lake.limits import check_lake_schema
from streamhouse.core.model.lake.partition_fields import (
    check_column_names,
    partition_names,
)
from streamhouse.core.model.merge_engine import is_merge_property
from streamhouse.core.model.partitioning import PartitionField
from streamhouse.core.model.properties import (
    FIXED_PROPERTIES,
    PROPERTY_HELP,
    TableProperties,
)
from streamhouse.core.model.schema import check_new_schema
from streamhouse.core.model.schema_change import change_schema
from streamhouse.core.model.table import (
    DEFAULT_DATABASE,
    TableDescriptor,
    TableInfo,
    TablePath,
    check_name,
    check_no_twin,
)
from streamhouse.core.model.values.checks import is_check_property
from streamhouse.reading.where.checks import Checks, check_columns_stay
from streamhouse.storage_service.directory._moved_tables import (
    MovedTables,
    settle_moves,
)
from streamhouse.storage_service.directory.damaged_table import DamagedTable
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.format_upgrade import find_former_tables
from streamhouse.storage_service.directory.service_state import (
    ServiceState,
    TableEntry,
    load_service_state,
    save_service_state,
    with_streams,
)
from streamhouse.storage_service.directory.table_files import load_table, write_table
from streamhouse.storage_service.directory.table_folders import (
    find_strangers,
    remove_remains,
)
from streamhouse.storage_service.ownership.shards.directory import ShardDirectory

__all__ = ["TableRegistry", "with_properties"]

_logger = logging.getLogger(__name__)


class TableRegistry:
    """The databases and tables of one data directory."""

    def __init__(
        self,
        directory: DataDirectory,
        *,
        databases_max: int,
        tables_max: int,
        buckets_max: int,
        names: ShardDirectory | None = None,
    ) -> None:
        self._directory = directory
        self._names = names
        self._unreleased: dict[TablePath, int] = {}
        self._databases_max = databases_max
        self._tables_max = tables_max
        self._buckets_max = buckets_max
        self._state = ServiceState(databases={DEFAULT_DATABASE})
        self._tables: dict[TablePath, TableInfo] = {}
        self._damaged: dict[TablePath, DamagedTable] = {}
        self.strangers: list[str] = []
        """A sentence for each entry in `tables/` that is no table and stays in place."""
        if directory.service_file.exists():
            self._load()
        elif any(directory.tables.iterdir()):
            raise CorruptDataError(
                f"{directory.path} has tables but no service.json: {directory.service_file_hint}"
            )
        else:
            directory.service_id = uuid.uuid4().hex if names is None else self._join(names, None)
            self._save()
        if names is not None:
            self._enter(names)
        self.moves: Final = MovedTables(self._state, self._tables, self._save)
        """Tables on their way to another shard, or to this one."""

    @property
    def service_id(self) -> str:
        """The id of the service, made with the data directory."""
        return self._directory.service_id

    def databases(self) -> list[str]:
        """Return the names of all databases, sorted."""
        return sorted(self._state.databases)

    def has_database(self, name: str) -> bool:
        """Return whether a database exists, to this shard's knowledge."""
        return name in self._state.databases

    def tables(self, database: str | None = None) -> list[TableInfo]:
        """Return all tables, or the tables of one database, sorted by path."""
        if database is not None:
            self._check_database(database)
        return [
            info
            for path, info in sorted(self._tables.items())
            if database is None or path.database == database
        ]

    def paths(self, database: str | None = None) -> list[TablePath]:
        """Return the paths of all tables, or of one database's, sorted, damaged tables included."""
        if database is not None:
            self._check_database(database)
        all_paths = {*self._tables, *self._damaged}
        return sorted(path for path in all_paths if database is None or path.database == database)

    def has(self, path: TablePath) -> bool:
        """Return whether the table exists, possibly damaged."""
        return path in self._tables or path in self._damaged

    def damaged(self) -> list[DamagedTable]:
        """Return the tables that cannot be served, sorted by path."""
        return [damaged for _, damaged in sorted(self._damaged.items())]

    def set_damaged(self, damaged: DamagedTable) -> None:
        """Exclude a damaged table from service until the next start; its files stay unchanged."""
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

    def former_streams(self, path: TablePath) -> set[str]:
        """Return the streams that wrote dropped tables of this path, of the latest thousand."""
        return {stream for name, stream in self._state.former_streams if name == str(path)}

    def check_dropped(self, path: TablePath, table_id: int) -> None:
        """Raise `UnavailableError` until the drop of the table is durable."""
        info = self._tables.get(path)
        if info is not None and info.table_id == table_id:
            raise self.not_open(path)

    @staticmethod
    def not_open(path: TablePath) -> UnavailableError:
        """Return the error for a table being created, dropped or moved.

        A caller that was told "does not exist" might begin anew, and a crash might undo the drop.
        """
        return UnavailableError(f"table '{path}' is not open now; try again")

    def not_found(self, path: TablePath) -> TableNotFoundError:
        """Return the error for a table that does not exist."""
        names = [str(name) for name in self.paths() if name != path]
        return TableNotFoundError(f"table '{path}' does not exist{suggestion(str(path), names)}")

    def create_database(self, name: str) -> None:
        """Create a database."""
        check_name("database", name)
        databases = self._state.databases
        if name in databases and self._names is None:
            raise DatabaseExistsError(f"database '{name}' already exists")
        others = databases if self._names is None else self._names.databases()
        check_no_twin("database", name, others)
        if len(databases) >= self._databases_max:
            raise RequestTooLargeError(
                f"database '{name}': the service has its limit of {self._databases_max} databases"
            )
        if self._names is not None:
            self._names.create_database(name)
        self._save_databases(databases | {name})

    def drop_database(self, name: str) -> None:
        """Drop an empty database; `default` stays."""
        self._follow_database(name)
        if name == DEFAULT_DATABASE:
            raise InvalidRequestError(f"database '{DEFAULT_DATABASE}' cannot be dropped")
        if tables := self.paths(name):
            raise DatabaseNotEmptyError(
                f"database '{name}' still has {len(tables)} tables, such as '{tables[0]}';"
                " drop them first"
            )
        if self._names is not None:
            self._names.drop_database(name)
        self._save_databases(self._state.databases - {name})

    def _save_databases(self, databases: set[str]) -> None:
        """Replace the databases; readers see the change when it is durable."""
        save_service_state(self._directory, replace(self._state, databases=databases))
        self._state.databases = databases

    def prepare_table(self, descriptor: TableDescriptor, *, created_at_us: int) -> TableInfo:
        """Return a new table under a new id, with an empty directory; `add_table` makes it exist.

        A caller that cannot fill the directory calls `withdraw_table`.
        """
        check_new_schema(descriptor.schema, table=str(descriptor.path))
        self.check_new(descriptor)
        info = TableInfo(
            descriptor=descriptor,
            table_id=self.reserve_table_id(above=self._last_id_elsewhere(descriptor.path)),
            created_at_us=created_at_us,
            nodes=dict.fromkeys(range(descriptor.bucket_count), ""),
        )
        self.make_directory(info)
        return info

    def check_new(self, descriptor: TableDescriptor) -> None:
        """Raise unless the table could be created now."""
        path = descriptor.path
        check_lake_schema(descriptor)
        Checks.of_table(TableInfo(descriptor=descriptor, table_id=0, created_at_us=0))
        self._follow_database(path.database)
        if path in self._damaged:
            raise TableExistsError(f"table '{path}' already exists, and is damaged")
        if path in self._tables:
            raise TableExistsError(f"table '{path}' already exists")
        check_no_twin("table", path, self.paths())
        if self._names is not None:
            self._names.check_free(path)
        self._check_limits(descriptor)

    def reserve_table_id(self, *, above: int = 0) -> int:
        """Return an unused id above another id, and never again."""
        state = self._state
        table_id = max(state.next_table_id, above + 1)
        if self._names is not None and state.ids_end is not None and table_id >= state.ids_end:
            table_id, state.ids_end = self._names.claim_ids(above=table_id - 1)
        state.next_table_id = table_id + 1
        # After a crash the remains of this id may be removed.
        state.creating.add(table_id)
        self._save()
        return table_id

    def _last_id_elsewhere(self, path: TablePath) -> int:
        # Of two lake tables of one name, the smaller id belongs to the dropped table.
        if self._names is None or self._state.ids_end is None:
            return 0
        return self._names.last_id_elsewhere(path, since=self._state.ids_end)

    def make_directory(self, info: TableInfo) -> None:
        """Make the directory of a new table."""
        directory = self._directory.table(info.table_id)
        try:
            if directory.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(directory))
            self._directory.filesystem.make_directory(directory)
        except OSError as error:
            raise StorageFailedError(
                f"cannot create table '{info.path}': {error.strerror}"
            ) from error

    def add_table(self, info: TableInfo) -> None:
        """Make the contents of a new table's directory a table, durably.

        After an UnknownOutcomeError the table does not exist here, and the next start decides.
        """
        path, table_id, state = info.path, info.table_id, self._state
        write_table(self._directory.table_file(table_id), info, generation=1)
        try:
            self._directory.filesystem.sync_directory(self._directory.tables)
        except OSError as error:
            raise StorageFailedError(f"cannot create table '{path}': {error.strerror}") from error
        if self._names is not None:
            self._names.hold(path, table_id)
        state.tables[table_id] = TableEntry(path, generation=1)
        state.creating.discard(table_id)
        try:
            self._save()
        except StreamhouseError:
            del state.tables[table_id]
            state.creating.add(table_id)
            raise
        self._tables[path] = info

    def withdraw_table(self, info: TableInfo) -> None:
        """Delete the files of a new table, never added and seen by no caller."""
        self._directory.filesystem.remove_tree(self._directory.table(info.table_id))
        if not self._directory.table(info.table_id).exists():
            self._state.creating.discard(info.table_id)
        self._release(info.path, info.table_id)

    def alter_properties(
        self, path: TablePath, *, updates: Mapping[str, str], removals: Sequence[str]
    ) -> TableInfo:
        """Set and remove properties together; an invalid property raises, without a change."""
        return self.replace_table(self.with_properties(path, updates=updates, removals=removals))

    def replace_table(self, changed: TableInfo) -> TableInfo:
        """Replace a table by a changed version of itself."""
        table_id = changed.table_id
        entry = self._state.tables[table_id]
        names = partition_names(self._tables[changed.path])
        changed = replace(changed, partition_names=names)
        generation = entry.generation + 1
        write_table(self._directory.table_file(table_id), changed, generation=generation)
        self._tables[changed.path] = changed
        self._state.tables[table_id] = replace(entry, generation=generation)
        try:
            self._save()
        except StreamhouseError as error:
            # The table is changed: the next save records the generation.
            _logger.warning("event=generation_not_saved table=%s why=%r", changed.path, error)
        return changed

    def with_properties(
        self, path: TablePath, *, updates: Mapping[str, str], removals: Sequence[str]
    ) -> TableInfo:
        """Return the table with other properties, unsaved; raises for an invalid property."""
        return with_properties(self.table(path), updates=updates, removals=removals)

    def alter_schema(self, path: TablePath, changes: Sequence[Mapping[str, Any]]) -> TableInfo:
        """Change the schema; raises and changes nothing for an invalid change."""
        info = self.table(path)
        changed = change_schema(info, changes)
        check_lake_schema(changed.descriptor)
        check_column_names(info, changed)
        check_columns_stay(info, changed)
        return self.replace_table(changed)

    def alter_partitioning(self, path: TablePath, partitioned_by: Sequence[str]) -> TableInfo:
        """Change the lake partitioning of future rows; raises for an invalid expression."""
        info = self.table(path)
        fields = tuple(PartitionField.parse(text) for text in partitioned_by)
        descriptor = replace(info.descriptor, partitioned_by=fields)
        check_lake_schema(descriptor)
        return self.replace_table(replace(info, descriptor=descriptor))

    def drop_table(self, paths: Sequence[TablePath], streams: Iterable[str]) -> None:
        """Drop tables, all or none; files wait for `purge`, or after a crash for the next start.

        `streams` have written rows of the first table: they are kept as `former_streams`.
        """
        infos = [self.table(path) for path in paths]
        former = self._state.former_streams
        self._state.former_streams = with_streams(former, paths[0], streams)
        try:
            self._remove_entries([info.table_id for info in infos], self._state.dropped)
        except StorageFailedError:
            self._state.former_streams = former
            raise
        for info in infos:
            del self._tables[info.path]
            self._release(info.path, info.table_id)

    def _remove_entries(self, table_ids: Sequence[int], remains: set[int]) -> None:
        """Remove tables from service.json durably, and add their ids to `remains`."""
        entries = {table_id: self._state.tables.pop(table_id) for table_id in table_ids}
        remains.update(table_ids)
        try:
            self._save()
        except StorageFailedError:
            self._state.tables |= entries
            remains.difference_update(table_ids)
            raise

    def drop_damaged(self, path: TablePath) -> None:
        """Drop a damaged table; its files stay in `tables/` as given up."""
        damaged = self._damaged.get(path)
        if damaged is None:
            raise InvalidRequestError(f"table '{self.table(path).path}' is not damaged: drop it")
        self._remove_entries([damaged.table_id], set())
        del self._damaged[path]
        self._give_up(damaged.table_id)
        self._release(path, damaged.table_id)

    def set_aside(self, path: TablePath, *, is_free: bool = False) -> None:
        """Remove a table from service.json; the files stay, and the name unless `is_free`."""
        info = self.table(path)
        self._remove_entries([info.table_id], set())
        del self._tables[path]
        self._give_up(info.table_id)
        if is_free:
            self._release(path, info.table_id)

    def _give_up(self, table_id: int) -> None:
        """Rename the directory of a removed table; under the old name it does no harm."""
        with contextlib.suppress(OSError):
            self._directory.filesystem.move_directory(
                self._directory.table(table_id), self._directory.given_up(table_id)
            )
            self._directory.filesystem.sync_directory(self._directory.tables)

    def check_arrival(self, info: TableInfo) -> None:
        """Raise unless there is room for a table of another shard."""
        self._follow_database(info.path.database)
        self._check_limits(info.descriptor)

    def purge(self, table_id: int) -> None:
        """Delete the files of a dropped table."""
        filesystem, dropped = self._directory.filesystem, self._directory.dropped(table_id)
        with contextlib.suppress(OSError):
            filesystem.move_directory(self._directory.table(table_id), dropped)
        filesystem.remove_tree(dropped)
        if not dropped.exists() and not self._directory.table(table_id).exists():
            # Durable with the next change: an id too many in the list does no harm.
            self._state.dropped.discard(table_id)

    # -- of several shards -----------------------------------------------------------------------

    def _join(self, names: ShardDirectory, service_id: str | None) -> str:
        """Join the service of the shards: return its id, and take a block of table ids."""
        state = self._state
        joined_id, block = names.join(service_id, next_table_id=state.next_table_id)
        if state.ids_end is None:
            if block is None:
                block = names.claim_ids(above=state.next_table_id - 1)
            elif service_id is not None:
                for database in state.databases:
                    names.enter_database(database)
            state.next_table_id, state.ids_end = block
        return joined_id

    def _enter(self, names: ShardDirectory) -> None:
        """Hold the names of exactly this shard's tables; take over the databases of all shards."""
        for path, why in names.clear(
            {entry.path: number for number, entry in self._state.tables.items()},
            arriving=self._state.arriving,
            # The save waits for the journal, which refuses a process that has lost its epoch.
            confirm=self._save,
        ).items():
            table_id = next(n for n, entry in self._state.tables.items() if entry.path == path)
            self.set_damaged(DamagedTable.of(path, table_id, TableExistsError(why)))
        self._state.databases = names.databases() | {path.database for path in self.paths()}

    def _follow_database(self, name: str) -> None:
        """Raise unless the database exists, in whichever shard it was made."""
        if self._names is not None:
            if self._names.has_database(name):
                self._state.databases.add(name)
            else:
                self._state.databases.discard(name)
        self._check_database(name)

    def _release(self, path: TablePath, table_id: int) -> None:
        """Release the name of a removed table, now or with the next change."""
        if self._names is None:
            return
        self._unreleased[path] = table_id
        self.release_names()

    def release_names(self) -> None:
        """Release the names of removed tables that the store did not release in time."""
        for path, table_id in tuple(self._unreleased.items()):
            assert self._names is not None
            try:
                self._names.release(path, table_id)
            except StreamhouseError as error:
                _logger.warning("event=name_not_released table=%s why=%r", path, error.message)
                return
            del self._unreleased[path]

    def _check_database(self, name: str) -> None:
        if name not in self._state.databases:
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
        save_service_state(self._directory, self._state)

    def _load(self) -> None:
        directory = self._directory
        self._state, is_former = load_service_state(directory)
        if self._names is not None:
            ids_end = self._state.ids_end
            self._join(self._names, directory.service_id)
            if ids_end is None:
                self._save()
        if is_former:
            find_former_tables(directory, self._state)
            self._save()
        state = self._state
        if self._names is not None and settle_moves(state, self._names):
            self._save()
        directory.former.update(n for n, entry in state.tables.items() if entry.is_former)
        remove_remains(directory, state)
        self.strangers = find_strangers(directory, state)
        for stranger in self.strangers:
            _logger.error("event=stranger why=%r", stranger)
        for table_id, entry in sorted(state.tables.items()):
            state.databases.add(entry.path.database)
            try:
                info, generation = load_table(directory, table_id, entry)
                self._tables[entry.path] = info
                # The file may be newer, after a crash before service.json was written.
                state.tables[table_id] = replace(entry, generation=generation)
            except StreamhouseError as error:
                self.set_damaged(DamagedTable.of(entry.path, table_id, error))

    def upgraded(self) -> None:
        """Record the present format for all files of every served table."""
        served = {info.table_id for info in self._tables.values()} & self._directory.former
        if not served:
            return
        for table_id in served:
            entry = self._state.tables[table_id]
            write_table(
                self._directory.table_file(table_id), self._tables[entry.path], generation=1
            )
            self._state.tables[table_id] = TableEntry(entry.path, generation=1)
        self._save()
        self._directory.former -= served


def with_properties(
    info: TableInfo, *, updates: Mapping[str, str], removals: Sequence[str]
) -> TableInfo:
    """Return the table with other properties, unsaved; raises for an invalid property."""
    path = info.path
    for key in (*updates, *removals):
        if is_merge_property(key) or key in FIXED_PROPERTIES:
            raise UnsupportedError(
                f"table '{path}': property {key} is fixed when the table is created, and that of a"
                " column added later when it is added: add_column(..., aggregate=...), `streamhouse"
                " alter --add ... --aggregate ...`, or a write with mergeSchema and the property"
            )
    properties = {**info.descriptor.properties, **updates}
    for key in removals:
        if key not in PROPERTY_HELP and not is_check_property(key):
            # Raises with a suggestion, as for a misspelt property to set.
            TableProperties.parse({key: ""}, table=str(path))
    for key in removals:
        properties.pop(key, None)
        if is_check_property(key):
            # Goes with its constraint.
            properties.pop(f"{key}.existing", None)
    descriptor = replace(info.descriptor, properties=properties)
    changed = replace(info, descriptor=descriptor)
    former, version = (t.properties().datalake_format_version for t in (info, changed))
    if (descriptor.batch_layout(), version) != (info.descriptor.batch_layout(), former):
        check_lake_schema(descriptor)
    if version < former:
        raise UnsupportedError(
            f"table '{path}': table.datalake.format-version = {former} stays: Iceberg has no way"
            " back to an earlier version"
        )
    Checks.of_table(changed)
    return changed
