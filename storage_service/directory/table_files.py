"""The state files of every table: `table.json` and `lake.json`.

`table.json` is the table after its last alteration, with the number of alterations; `lake.json` is
the state of the lake.
"""

from __future__ import annotations

from dataclasses import replace

from streamhouse.core.errors import CorruptDataError, StreamhouseError
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.table import TableInfo
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.service_state import TableEntry
from streamhouse.storage_service.directory.state_file import StateFile

__all__ = ["load_lake_state", "load_table", "read_table", "save_lake_state", "write_table"]


def read_table(file: StateFile) -> tuple[TableInfo, int]:
    """Return the table and its generation; 0 in the format without generations.

    Raises `CorruptDataError`.
    """
    content = file.load()
    generation = content.pop("generation", 0)
    try:
        return TableInfo.from_json(content), int(generation)
    except (StreamhouseError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptDataError(f"{file.path} describes no table: {error!r}") from error


def load_table(directory: DataDirectory, table_id: int, entry: TableEntry) -> tuple[TableInfo, int]:
    """Return a table with an entry in service.json, and its generation.

    Raises `CorruptDataError` if the table's file is missing, damaged, old, or another table's.
    """
    if not directory.table(table_id).is_dir():
        raise CorruptDataError(f"its directory {directory.table(table_id)} is missing")
    file = directory.table_file(table_id)
    info, generation = read_table(file)
    if (info.path, info.table_id) != (entry.path, table_id):
        raise CorruptDataError(
            f"{file.path} is of table {info.table_id} '{info.path}', not of {table_id}"
            f" '{entry.path}'"
        )
    if generation < entry.generation:
        raise CorruptDataError(
            f"{file.path} is an old version: it is the {generation}., and service.json knows of the"
            f" {entry.generation}."
        )
    return info, generation


def write_table(file: StateFile, info: TableInfo, *, generation: int) -> None:
    """Save `info` as the table, durably; raises as `StateFile.save`."""
    file.save({**info.to_json(), "generation": generation})


def load_lake_state(directory: DataDirectory, table: TableInfo) -> LakeState:
    """Return the saved state, with every bucket.

    A table of a former release has a saved state only after its first tiering.
    """
    zero_offsets = dict.fromkeys(range(table.bucket_count), 0)
    file = directory.lake_file(table.table_id)
    if file.is_former and not file.exists():
        return LakeState(tiered_offsets=zero_offsets)
    try:
        state = LakeState.from_json(file.load())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptDataError(f"{file.path} holds no lake state: {error!r}") from error
    return replace(state, tiered_offsets={**zero_offsets, **state.tiered_offsets})


def save_lake_state(directory: DataDirectory, table: TableInfo, state: LakeState) -> None:
    """Save `state` as the table's lake state; durable on return."""
    directory.lake_file(table.table_id).save(state.to_json())
