"""A table's lake state on disk: `lake.json`, which every table has, replaced as a whole."""

from __future__ import annotations

from dataclasses import replace

from streamhouse.storage_service.engine.directory.data_directory import DataDirectory
from streamhouse.storage_service.errors import CorruptDataError
from streamhouse.storage_service.model.lake import LakeState
from streamhouse.storage_service.model.table import TableInfo

__all__ = ["load_lake_state", "save_lake_state"]


def load_lake_state(directory: DataDirectory, table: TableInfo) -> LakeState:
    """Return the saved state; it has every bucket.

    Of a former release a table has one only once somebody tiered it.
    """
    nothing_tiered = dict.fromkeys(range(table.bucket_count), 0)
    file = directory.lake_file(table.table_id)
    if file.is_former and not file.exists():
        return LakeState(tiered_offsets=nothing_tiered)
    try:
        state = LakeState.from_json(file.load())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptDataError(f"{file.path} holds no lake state: {error!r}") from error
    return replace(state, tiered_offsets={**nothing_tiered, **state.tiered_offsets})


def save_lake_state(directory: DataDirectory, table: TableInfo, state: LakeState) -> None:
    """Make `state` the table's lake state; durable on return."""
    directory.lake_file(table.table_id).save(state.to_json())
