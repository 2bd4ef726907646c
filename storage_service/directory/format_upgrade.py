"""A data directory of the release before: which tables it has, and sealing its files.

In format 1 the directories said which tables there are, and JSON files had no checksum. The first
start writes service.json first, so that the release before does not take the directory for its own
any more, and then seals every table's files as it opens it. Every step can be interrupted and
repeated; nothing is removed but what was dropped.
"""

from __future__ import annotations

from pathlib import Path

from streamhouse.core.errors import CorruptDataError
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.storage_service.directory.data_directory import (
    DROPPED_SUFFIX,
    DataDirectory,
)
from streamhouse.storage_service.directory.service_state import KnownTable, ServiceState
from streamhouse.storage_service.directory.table_files import (
    load_lake_state,
    read_table,
    save_lake_state,
)
from streamhouse.storage_service.log.segments.segment_format import offsets_of

__all__ = ["find_former_tables", "upgrade_files"]


def find_former_tables(directory: DataDirectory, state: ServiceState) -> None:
    """Fill in the tables that a directory of format 1 has.

    Of several for one path the latest is the table. Raises `CorruptDataError` for a table whose
    file cannot be read: without it nobody knows its name.
    """
    ids: dict[TablePath, int] = {}
    for path in sorted(directory.tables.iterdir()):
        table_id = _id_of(path.name.removesuffix(DROPPED_SUFFIX))
        if table_id is None:
            continue
        if path.name.endswith(DROPPED_SUFFIX):
            state.dropped.add(table_id)
        elif directory.table_file(table_id).exists():
            info = _former_table(directory, table_id, state)
            ids[info.path] = max(table_id, ids.get(info.path, 0))
        elif not any(file.is_file() for file in path.rglob("*")):
            state.creating.add(table_id)
    state.tables = {table_id: KnownTable(path, 0, True) for path, table_id in ids.items()}


def _id_of(name: str) -> int | None:
    return int(name) if name.isascii() and name.isdecimal() and str(int(name)) == name else None


def _former_table(directory: DataDirectory, table_id: int, state: ServiceState) -> TableInfo:
    directory.former.add(table_id)
    file = directory.table_file(table_id)
    info, generation = read_table(file)
    if generation:
        raise CorruptDataError(
            f"{directory.service_file} is of an older release than {file.path}:"
            f" {directory.service_file_hint}"
        )
    if info.table_id != table_id or table_id >= state.next_table_id:
        raise CorruptDataError(f"{file.path.parent}: its table.json is of table {info.table_id}")
    return info


def upgrade_files(directory: DataDirectory, info: TableInfo) -> None:
    """Seal what lake and readers have of a former table; its transactions are sealed when loaded.

    Raises `CorruptDataError` for a file that is damaged; those before it are sealed then.
    """
    table_id = info.table_id
    _check_lake_state(directory, info)
    save_lake_state(directory, info, load_lake_state(directory, info))
    for file in (directory.lake_pins_file(table_id), directory.row_ages_file(table_id)):
        if file.exists():
            file.save(file.load())


def _check_lake_state(directory: DataDirectory, info: TableInfo) -> None:
    """Raise if a table without a lake state cannot have been without one all the time."""
    if directory.lake_file(info.table_id).exists() or not info.properties().datalake_enabled:
        return
    for bucket in range(info.bucket_count):
        start = _start_of(directory.bucket(info.table_id, bucket))
        if start:
            raise CorruptDataError(
                f"{directory.lake_file(info.table_id).path} is missing: the log of bucket {bucket}"
                f" begins at {start}, and what came before is in the lake"
            )


def _start_of(bucket: Path) -> int:
    names = [path.name for path in bucket.iterdir()] if bucket.is_dir() else []
    return min(offsets_of(names, ".log"), default=0)
