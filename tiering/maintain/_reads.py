"""What reading a lake table costs beside the least it could, and the rewrite that mends it. Pure.

A read opens every file. A round whose rows go everywhere adds a small file, and a file of deletes,
to each bucket of each partition, and the ordinary plan waits for eight of a size: by then a read
takes many times as long as it would of one file each. So the larger the debt, the fewer
neighbours are enough, until reads cost about what they should.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Final

from streamhouse.lake.snapshots.inventory import LiveDeletes, LiveFile
from streamhouse.tiering.maintain._maintenance_plan import (
    RewriteLimits,
    RewritePlan,
    merged_deletes,
    neighbours,
    plan_rewrite,
)

__all__ = ["ReadCost", "least_files", "lone_files", "plan_for_reads"]

# To plan and open a file takes about as long as to read so many rows.
FILE_ROWS: Final = 20_000
# Reads are to cost less than twice the least; this leaves room for the next round.
_COST_TOLERATED: Final = 1.5


@dataclass(frozen=True, slots=True)
class ReadCost:
    """What a whole read opens (`files`, also of deletes) and reads (`rows`, also deleted ones)."""

    files: int
    rows: int

    @property
    def units(self) -> int:
        """The cost in rows."""
        return self.files * FILE_ROWS + self.rows

    def is_debt(self, least: ReadCost, limits: RewriteLimits) -> bool:
        """Whether reads cost so much more than `least` that files are worth rewriting early."""
        is_much = self.files - least.files >= limits.excess_files_min
        return is_much and self.units > _COST_TOLERATED * least.units


def least_files(files: Collection[LiveFile], limits: RewriteLimits) -> int:
    """Return how many files there would be if all were packed that may be."""
    placeless = sum(file.bucket is None for file in files)
    return placeless + sum(
        _packed(members, limits) for members in neighbours(files, limits.slice_us)
    )


def lone_files(files: Collection[LiveFile], limits: RewriteLimits) -> int:
    """Return how many files are small, and have no neighbour that they may be packed with."""
    return sum(
        len(members) == 1 and not members[0].is_fixed and members[0].live_bytes < limits.full_bytes
        for members in neighbours(files, limits.slice_us)
    )


def plan_for_reads(
    files: Collection[LiveFile], deletes: Collection[LiveDeletes], limits: RewriteLimits
) -> RewritePlan:
    """Plan the rewrite of `limits`; of a table with debt, the cheapest one that pays it off."""
    plan = plan_rewrite(files, deletes, limits)
    if limits.is_eager:
        return plan
    live_rows = sum(file.row_count - file.deleted_rows for file in files)
    least = ReadCost(least_files(files, limits), live_rows)
    best, cost = plan, _cost_after(files, deletes, plan)
    for stricter in _stricter(limits):
        if not cost.is_debt(least, limits):
            break
        found = plan_rewrite(files, deletes, stricter)
        if (found_cost := _cost_after(files, deletes, found)).units < cost.units:
            best, cost = found, found_cost
    # What is left of the debt has time; what the table's own limits ask for has not.
    return replace(best, has_more=plan.has_more)


def _stricter(limits: RewriteLimits) -> Iterator[RewriteLimits]:
    """Yield limits under which more is rewritten, step by step."""
    for least in (4, 2):
        yield replace(
            limits,
            files_min=min(limits.files_min, least),
            deletes_min=min(limits.deletes_min, least),
        )
    for share in (8, 4, 2, 1):
        # Files of any size are merged then, those first that are cheapest for what it saves.
        yield replace(
            limits,
            files_min=2,
            deletes_min=2,
            is_eager=True,
            bytes_max=max(1, limits.bytes_max // share),
        )


def _packed(members: Collection[LiveFile], limits: RewriteLimits) -> int:
    """Return how many files neighbours would be; those that are fixed or full stay."""
    small = [f for f in members if not f.is_fixed and f.live_bytes < limits.full_bytes]
    live_bytes = sum(file.live_bytes for file in small)
    return len(members) - len(small) + -(-live_bytes // limits.target_bytes)


def _cost_after(
    files: Collection[LiveFile], deletes: Collection[LiveDeletes], plan: RewritePlan
) -> ReadCost:
    """Return what a read costs once the plan is done."""
    groups, merges = plan.groups, plan.merges
    data = len(files) + sum(group.outputs - len(group.files) for group in groups)
    left = len(deletes) - len(plan.dropped)
    for merge in merges:
        paths = frozenset[str]().union(*(found.data_paths for found in merge)) & plan.live_paths
        left += merged_deletes(len(paths)) - len(merge)
    rows = sum(file.row_count for file in files)
    rows -= sum(file.deleted_rows for group in groups for file in group.files)
    return ReadCost(data + left, rows)
