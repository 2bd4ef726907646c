"""A connection's tables: read, or with committed positions.

A client without leader epochs does not notice a table dropped and created again under the old name.
The history of the client's connection then identifies the table of a position. Event loop only.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from streamhouse.storage_service.kafka.groups.coordinator import GroupKey

__all__ = ["ReadTables"]

# Clients commit for one group per connection, and for all topics that they read.
_COMMITTED_MAX: Final = 10_000

_Bits: TypeAlias = int


class ReadTables:
    """One connection's history with tables; a few bytes for each table."""

    def __init__(self) -> None:
        self._read: dict[str, dict[int, _Bits]] = {}
        """Topic -> table id -> the partitions read last; bit n is partition n."""
        self._committed: dict[tuple[GroupKey, str], int] = {}

    def note_read(self, topic: str, table_id: int, partition: int) -> bool:
        """Record a read of a partition; return whether the last read was of another table."""
        tables = self._read.setdefault(topic, {})
        bit = 1 << partition
        if tables.get(table_id, 0) & bit:
            return False
        is_switch = False
        for earlier_id in [earlier_id for earlier_id, bits in tables.items() if bits & bit]:
            is_switch = True
            tables[earlier_id] &= ~bit
            if not tables[earlier_id]:
                del tables[earlier_id]
        tables[table_id] = tables.get(table_id, 0) | bit
        return is_switch

    def note_position(self, key: GroupKey, topic: str, table_id: int) -> None:
        """Record that the client knows the group's position in this table."""
        self._committed.pop((key, topic), None)
        self._committed[key, topic] = table_id
        if len(self._committed) > _COMMITTED_MAX:
            del self._committed[next(iter(self._committed))]

    def commits_to_other_table(self, key: GroupKey, topic: str, table_id: int) -> bool:
        """Return whether the client's positions of the group belong to another table.

        A client without a fetched position is trusted, and the table is recorded.
        """
        return self._committed.setdefault((key, topic), table_id) != table_id
