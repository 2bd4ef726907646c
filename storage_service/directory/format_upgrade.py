"""The upgrade of a data directory of the previous release: its tables, and the sealing of files.

In format 1 the folders alone defined the tables, and JSON files had no checksum. The first start
writes service.json first: from now on the previous release refuses the directory. Then every
table's files are sealed when the table is opened. Every step can be interrupted and repeated; only
dropped tables are removed.
"""

from __future__ import annotations

from pathlib import Path

from streamhouse.core.errors import CorruptDataError
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.storage_service.directory.data_directory import (
    DROPPED_SUFFIX,
    DataDirectory,
)
from streamhouse.storage_service.directory.service_state import ServiceState, TableEntry
from streamhouse.storage_service.directory.table_files import (
    load_lake_state,
    read_table,
    save_lake_state,
)
from streamhouse.storage_service.log.segments.segment_format import offsets_of

__all__ = ["find_former_tables", "upgrade_files"]


def find_former_tables(directory: DataDirectory, state: ServiceState) -> None:
    """Fill in the tables of a directory in format 1.

    Of several tables for a path the latest counts. Raises `CorruptDataError` for a table with an
    unreadable file: the file alone has the table's name.
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
    state.tables = {table_id: TableEntry(path, 0, True) for path, table_id in ids.items()}


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
    """Seal the lake state and the files of readers of a former table.

    Transactions are sealed when they are loaded. Raises `CorruptDataError` for a damaged file; the
    earlier files are sealed then.
    """
    table_id = info.table_id
    _check_lake_state(directory, info)
    save_lake_state(directory, info, load_lake_state(directory, info))
    for file in (directory.lake_pins_file(table_id), directory.row_ages_file(table_id)):
        if file.exists():
            file.save(file.load())


def _check_lake_state(directory: DataDirectory, info: TableInfo) -> None:
    """Raise if a table lacks a lake state, though the log begins above 0."""
    if directory.lake_file(info.table_id).exists() or not info.properties().datalake_enabled:
        return
    for bucket in range(info.bucket_count):
        start = _first_offset(directory.bucket(info.table_id, bucket))
        if start:
            raise CorruptDataError(
                f"{directory.lake_file(info.table_id).path} is missing: the log of bucket {bucket}"
                f" begins at {start}, and what came before is in the lake"
            )


def _first_offset(bucket: Path) -> int:
    names = [path.name for path in bucket.iterdir()] if bucket.is_dir() else []
    return min(offsets_of(names, ".log"), default=0)
