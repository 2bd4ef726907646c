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
    """Return how many names each shard has; those of tables to come count as well."""
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
    """Return the shard for a new table; `own` if no other is live or better.

    Load is compared in tenths of a core, then the number of tables, then who was asked: a table
    that may as well be made here is made here.
    """

    def rank(shard: str) -> tuple[int, int, bool, str]:
        record = records.get(shard)
        load = 0 if record is None else record.load_millicores // _LOAD_STEP_MILLICORES
        return load, tables.get(shard, 0), shard != own, shard

    return min({*live, own}, key=rank)
