"""Which tables a connection has read, and committed positions of.

A client that tells no leader epoch does not notice that a table was dropped and made again under
its name. Its connection is the same, so what came by it before tells of which table a position is.
Event loop only.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from streamhouse.storage_service.kafka.groups.coordinator import GroupKey

__all__ = ["ReadTables"]

# Clients commit for one group by a connection, and for as many topics as they read.
_COMMITTED_MAX: Final = 10_000

_Bits: TypeAlias = int


class ReadTables:
    """What one connection has done with tables; a few bytes for each that it has read."""

    def __init__(self) -> None:
        self._read: dict[str, dict[int, _Bits]] = {}
        """By topic and table id, which partitions were read last: bit n is partition n."""
        self._committed: dict[tuple[GroupKey, str], int] = {}

    def note_read(self, topic: str, table_id: int, partition: int) -> bool:
        """Note that a partition is read of this table; return whether it was of another one."""
        tables = self._read.setdefault(topic, {})
        bit = 1 << partition
        if tables.get(table_id, 0) & bit:
            return False
        is_other = False
        for other in [one for one, bits in tables.items() if bits & bit]:
            is_other = True
            tables[other] &= ~bit
            if not tables[other]:
                del tables[other]
        tables[table_id] = tables.get(table_id, 0) | bit
        return is_other

    def note_position(self, key: GroupKey, topic: str, table_id: int) -> None:
        """Note that the client knows where a group is in this table."""
        self._committed.pop((key, topic), None)
        self._committed[key, topic] = table_id
        if len(self._committed) > _COMMITTED_MAX:
            del self._committed[next(iter(self._committed))]

    def commits_to_other_table(self, key: GroupKey, topic: str, table_id: int) -> bool:
        """Whether the client has positions of the group that are of another table.

        One that commits without having asked is taken at its word, from then on.
        """
        return self._committed.setdefault((key, topic), table_id) != table_id
