"""A table's lake state on disk: `lake.json`, replaced as a whole."""

from __future__ import annotations

from dataclasses import replace

from streamhouse.storage_service.errors import CorruptDataError
from streamhouse.storage_service.model.lake import LakeState
from streamhouse.storage_service.model.table import TableInfo
from streamhouse.storage_service.tablet.data_directory import DataDirectory
from streamhouse.storage_service.tablet.durable_json import read_json, replace_json

__all__ = ["load_lake_state", "save_lake_state"]


def load_lake_state(directory: DataDirectory, table: TableInfo) -> LakeState:
    """Return the saved state, or that of a table nobody has tiered; it has every bucket."""
    nothing_tiered = dict.fromkeys(range(table.bucket_count), 0)
    path = directory.lake_file(table.table_id)
    if not path.exists():
        return LakeState(tiered_offsets=nothing_tiered)
    try:
        state = LakeState.from_json(read_json(path))
    except (TypeError, ValueError, AttributeError) as error:
        raise CorruptDataError(f"{path} holds no lake state: {error}") from error
    return replace(state, tiered_offsets={**nothing_tiered, **state.tiered_offsets})


def save_lake_state(directory: DataDirectory, table: TableInfo, state: LakeState) -> None:
    """Make `state` the table's lake state; durable on return."""
    replace_json(directory.lake_file(table.table_id), state.to_json())
