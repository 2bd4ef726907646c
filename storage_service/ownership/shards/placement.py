"""Where a new table goes: to the live shard with the least load."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from streamhouse.storage_service.ownership.shards.directory import ShardRecord
from streamhouse.storage_service.ownership.shards.entries import NameEntry, NameState

__all__ = ["least_loaded", "table_counts"]

# Differences below a tenth of a core are noise: then the number of tables decides.
_LOAD_STEP_MILLICORES: Final = 100


def table_counts(entries: Iterable[NameEntry]) -> dict[str, int]:
    """Return the number of names of each shard, assigned names included."""
    counts: dict[str, int] = {}
    for entry in entries:
        if entry.state is not NameState.FREE:
            counts[entry.shard] = counts.get(entry.shard, 0) + 1
    return counts


def least_loaded(
    live: Collection[str],
    *,
    records: Mapping[str, ShardRecord],
    tables: Mapping[str, int],
    own: str,
) -> str:
    """Return the shard for a new table; `own` if no live shard is better.

    Compared in order: load in tenths of a core, the number of tables, then `own` first.
    """

    def rank(shard: str) -> tuple[int, int, bool, str]:
        record = records.get(shard)
        load = 0 if record is None else record.load_millicores // _LOAD_STEP_MILLICORES
        return load, tables.get(shard, 0), shard != own, shard

    return min({*live, own}, key=rank)
