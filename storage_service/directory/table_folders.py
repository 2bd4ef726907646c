"""The folders in `tables/` that are not tables: removable remains, and folders to leave alone.

A folder is removed only if service.json named it before: as a dropped table, or as an interrupted
creation without a row. A missing file is never a reason. Every other folder stays in place, is not
served, and is reported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from streamhouse.core.errors import CorruptDataError, StreamhouseError
from streamhouse.storage_service.directory.data_directory import (
    DROPPED_SUFFIX,
    GIVEN_UP_SUFFIX,
    DataDirectory,
)
from streamhouse.storage_service.directory.service_state import ServiceState
from streamhouse.storage_service.log.segments.segment_format import (
    FILE_HEADER_BYTES,
    offsets_of,
    segment_path,
)

__all__ = ["find_strangers", "remove_remains"]

_logger = logging.getLogger(__name__)

_ROW_FILE_SUFFIXES: Final = (".part", ".open", ".decision", ".sst")


def remove_remains(directory: DataDirectory, state: ServiceState) -> None:
    """Delete the remains of dropped tables and of interrupted creations."""
    for table_id in sorted(state.dropped):
        for path in (directory.table(table_id), directory.dropped(table_id)):
            directory.filesystem.remove_tree(path)
        if not directory.table(table_id).exists() and not directory.dropped(table_id).exists():
            state.dropped.discard(table_id)
    for table_id in sorted(state.creating):
        path = directory.table(table_id)
        if path.exists() and _is_cut_off_creation(path):
            _logger.info("event=creation_cleared table_id=%d", table_id)
            directory.filesystem.remove_tree(path)
        if not path.exists():
            state.creating.discard(table_id)


def find_strangers(directory: DataDirectory, state: ServiceState) -> list[str]:
    """Return a sentence for each entry in `tables/` that is no table and stays.

    Raises `CorruptDataError` for a table which shows that service.json is too old.
    """
    return list(_strangers(directory, state))


def _strangers(directory: DataDirectory, state: ServiceState) -> Iterator[str]:
    for path in sorted(directory.tables.iterdir()):
        name = path.name.removesuffix(DROPPED_SUFFIX)
        table_id = int(name) if name.isascii() and name.isdecimal() else -1
        if str(table_id) == path.name and table_id in state.tables:
            continue
        if path.name.endswith(GIVEN_UP_SUFFIX) or table_id in {*state.dropped, *state.arriving}:
            continue
        if path.name == str(table_id) and table_id in state.creating and _is_cut_off_creation(path):
            # The next start clears the folder.
            continue
        if path.name == str(table_id) and _is_of_this_service(directory, table_id):
            # A table that moved here has an id of the other shard.
            is_own_id = state.ids_end is None or table_id < state.ids_end
            if table_id >= state.next_table_id and is_own_id:
                raise CorruptDataError(
                    f"{directory.service_file} is older than table {table_id}, which it does not"
                    f" know: {directory.service_file_hint}"
                )
            yield (
                f"{path} has a table that service.json does not know: it was dropped, or"
                " service.json is older than it; nothing was changed"
            )
            continue
        yield f"{path} is no table that service.json knows; nothing was changed"


def _is_of_this_service(directory: DataDirectory, table_id: int) -> bool:
    try:
        directory.table_file(table_id).load()
    except StreamhouseError:
        return False
    return True


def _is_cut_off_creation(path: Path) -> bool:
    """Return whether a directory has no row, and no sign of a completed creation."""
    starts_above_zero = False
    for file in path.rglob("*"):
        if file.suffix in _ROW_FILE_SUFFIXES:
            return False
        if file.suffix == ".log" and file.stat().st_size > FILE_HEADER_BYTES:
            return False
    for bucket in path.glob("bucket-*"):
        bases = offsets_of([file.name for file in bucket.iterdir()], ".log")
        starts_above_zero |= any(base > 0 and segment_path(bucket, base).exists() for base in bases)
    return not starts_above_zero or not (path / "table.json").exists()
