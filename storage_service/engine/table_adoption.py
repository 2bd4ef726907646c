"""A table that begins with the lake it had elsewhere: its log starts where the lake ends.

Order: the id is durable, the lake tables are this table's, then the table's directory is filled and
at last service.json names it. A crash before that leaves no table, and lake tables that can be
adopted again; nothing was written to them but whose they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from streamhouse.storage_service.engine.directory.data_directory import DataDirectory
from streamhouse.storage_service.engine.directory.table_registry import TableRegistry
from streamhouse.storage_service.engine.opener import NewTable
from streamhouse.storage_service.errors import StorageFailedError
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.segment_format import LogIdentity
from streamhouse.storage_service.log.segment_roll import begin_log
from streamhouse.storage_service.model.lake import LakeState
from streamhouse.storage_service.model.table import TableDescriptor, TableInfo

__all__ = ["Adoptable", "adopt_table", "begin_adopted", "take_over"]


class Adoptable(Protocol):
    """Lake tables that a table of this service can go on from. Blocking."""

    @property
    def descriptor(self) -> TableDescriptor:
        """What the table is."""

    @property
    def owner_id(self) -> int:
        """The table id that the lake tables have so far; the new one must be above."""

    def take_over(self, table_id: int, *, now_us: int) -> tuple[TableInfo, LakeState]:
        """Make the lake tables those of the table with this id, and return the table."""


def adopt_table(
    find: Callable[[], Adoptable], registry: TableRegistry, directory: DataDirectory, now_us: int
) -> NewTable:
    """Fill the directory of the table that `find` finds, to be opened and added. Blocking.

    It has no rows in the log.
    """
    found = find()
    registry.check_new(found.descriptor)
    return begin_adopted(take_over(found, registry, now_us), registry, directory, now_us)


class TakenOver(NamedTuple):
    """Lake tables that are a new table's by now, and that table."""

    info: TableInfo
    lake: LakeState


def take_over(found: Adoptable, registry: TableRegistry, now_us: int) -> TakenOver:
    """Make lake tables those of a new table's, which is still to be begun. Blocking."""
    table_id = registry.reserve_table_id(above=found.owner_id)
    return TakenOver(*found.take_over(table_id, now_us=now_us))


def begin_adopted(
    taken: TakenOver, registry: TableRegistry, directory: DataDirectory, now_us: int
) -> NewTable:
    """Fill the directory of the table that has taken lake tables over. Blocking."""
    info, lake = taken
    table_id = info.table_id
    registry.make_directory(info)
    try:
        for bucket, end in lake.tiered_offsets.items():
            begin_log(
                directory.bucket(table_id, bucket),
                first_offset=end,
                identity=LogIdentity(table_id, bucket),
                filesystem=LocalFilesystem(),
                now_us=now_us,
            )
    except OSError as error:
        registry.withdraw_table(info)
        raise StorageFailedError(f"cannot create table '{info.path}': {error.strerror}") from error
    return NewTable(info, lake, truncated_at_us=now_us)
