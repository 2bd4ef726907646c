"""The rebuilding of a lost service.json from the tables' own files.

Only if all tables agree: one service, no two tables of one name. Databases without tables are lost
with the file, and so is the highest table id ever used: new ids start far above the existing ones.
The old file stays beside the new one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from streamhouse.core.errors import (
    CorruptDataError,
    InvalidRequestError,
    StorageFailedError,
    StreamhouseError,
)
from streamhouse.core.model.table import DEFAULT_DATABASE
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.service_state import (
    ServiceState,
    TableEntry,
    load_service_state,
    save_service_state,
)
from streamhouse.storage_service.directory.table_files import read_table
from streamhouse.storage_service.directory.table_folders import find_strangers

__all__ = ["rebuild_service_file"]

# Dropped tables had ids, too, and lake tables may still have these ids.
_IDS_SKIPPED: Final = 1_000


def rebuild_service_file(directory: DataDirectory) -> list[str]:
    """Rebuild service.json from the tables; return the tables' paths. The directory is locked.

    Raises `InvalidRequestError` if the present file is sound, `CorruptDataError` if the tables do
    not agree; then nothing is changed.
    """
    if _is_sound(directory):
        raise InvalidRequestError(f"{directory.service_file} is sound: nothing was changed")
    directory.former.clear()
    state = ServiceState(databases={DEFAULT_DATABASE})
    services: dict[str, Path] = {}
    for path in sorted(directory.tables.iterdir()):
        number = path.name.partition(".")[0]
        if not (number.isascii() and number.isdecimal()):
            continue
        table_id = int(number)
        state.next_table_id = max(state.next_table_id, table_id + _IDS_SKIPPED)
        if path.name != number:
            continue
        entry = _table_entry(directory, table_id, services)
        twin = next(
            (n for n, entry_before in state.tables.items() if entry_before.path == entry.path), None
        )
        if twin is not None:
            raise CorruptDataError(
                f"tables/{twin} and tables/{table_id} both have table '{entry.path}': move the"
                " dropped one away"
            )
        state.tables[table_id] = entry
        state.databases.add(entry.path.database)
    if len(services) != 1:
        paths_of_services = ", ".join(
            f"{path} of service {name}" for name, path in services.items()
        )
        raise CorruptDataError(
            f"the tables are not all of one service: {paths_of_services}: move foreign tables away"
            if services
            else f"{directory.tables} has no table to rebuild service.json from"
        )
    directory.service_id = next(iter(services))
    if directory.service_file.exists():
        try:
            directory.filesystem.rename(
                directory.service_file, directory.service_file.with_suffix(".json.damaged")
            )
        except OSError as error:
            raise StorageFailedError(
                f"{directory.service_file} cannot be moved: {error.strerror}"
            ) from error
    save_service_state(directory, state)
    return [str(entry.path) for entry in state.tables.values()]


def _table_entry(directory: DataDirectory, table_id: int, services: dict[str, Path]) -> TableEntry:
    directory.service_id = ""
    file = directory.table_file(table_id)
    try:
        info, generation = read_table(file)
    except StreamhouseError as error:
        raise CorruptDataError(
            f"{error.message}; put the file back, or move {file.path.parent} away"
        ) from error
    if info.table_id != table_id:
        raise CorruptDataError(f"{file.path} is of table {info.table_id}: rename the directory")
    services.setdefault(str(json.loads(file.path.read_bytes())["service_id"]), file.path)
    return TableEntry(info.path, generation)


def _is_sound(directory: DataDirectory) -> bool:
    try:
        state, _ = load_service_state(directory)
        return not find_strangers(directory, state)
    except StreamhouseError:
        return False
