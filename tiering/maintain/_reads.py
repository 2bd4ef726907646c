"""The cost of reading a lake table against the least cost, and the rewrite that lowers it. Pure.

A read opens every file. A round whose rows go everywhere adds a small file, and a file of deletes,
to each bucket of each partition. The ordinary plan waits for eight files of a size: by then a read
takes many times as long as a read of packed files. The larger the debt, the fewer neighbours are
enough, until reads cost about the least.
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

# Planning and opening a file takes about as long as reading this many rows.
FILE_ROWS: Final = 20_000
# Reads should cost less than twice the least; 1.5 leaves room for the next round.
_COST_TOLERATED: Final = 1.5


@dataclass(frozen=True, slots=True)
class ReadCost:
    """The `files` (data and deletes) and `rows` (also deleted rows) that a whole read takes."""

    files: int
    rows: int

    @property
    def units(self) -> int:
        """The cost in rows."""
        return self.files * FILE_ROWS + self.rows

    def is_debt(self, least: ReadCost, limits: RewriteLimits) -> bool:
        """Whether an early rewrite pays off: reads cost far more than `least`."""
        is_much = self.files - least.files >= limits.excess_files_min
        return is_much and self.units > _COST_TOLERATED * least.units


def least_files(files: Collection[LiveFile], limits: RewriteLimits) -> int:
    """Return how many files remain after packing every file that may be packed."""
    placeless = sum(file.bucket is None for file in files)
    return placeless + sum(
        _packed(members, limits) for members in neighbours(files, limits.slice_us)
    )


def lone_files(files: Collection[LiveFile], limits: RewriteLimits) -> int:
    """Return how many small files have no neighbour to be packed with."""
    return sum(
        len(members) == 1 and not members[0].is_fixed and members[0].live_bytes < limits.full_bytes
        for members in neighbours(files, limits.slice_us)
    )


def plan_for_reads(
    files: Collection[LiveFile], deletes: Collection[LiveDeletes], limits: RewriteLimits
) -> RewritePlan:
    """Plan the rewrite of `limits`; for a table with read debt, the cheapest that pays it off."""
    plan = plan_rewrite(files, deletes, limits)
    if limits.is_eager:
        return plan
    live_rows = sum(file.row_count - file.deleted_rows for file in files)
    least = ReadCost(least_files(files, limits), live_rows)
    best, cost = plan, _cost_after(files, deletes, plan)
    for stricter in _stricter(limits):
        if not cost.is_debt(least, limits):
            break
        candidate = plan_rewrite(files, deletes, stricter)
        if (candidate_cost := _cost_after(files, deletes, candidate)).units < cost.units:
            best, cost = candidate, candidate_cost
    # The remaining debt has time; rewrites within the table's own limits do not.
    return replace(best, has_more=plan.has_more)


def _stricter(limits: RewriteLimits) -> Iterator[RewriteLimits]:
    """Yield limits that rewrite more and more files, step by step."""
    for least in (4, 2):
        yield replace(
            limits,
            files_min=min(limits.files_min, least),
            deletes_min=min(limits.deletes_min, least),
        )
    for share in (8, 4, 2, 1):
        # Files of any size are merged here, the cheapest for their gain first.
        yield replace(
            limits,
            files_min=2,
            deletes_min=2,
            is_eager=True,
            bytes_max=max(1, limits.bytes_max // share),
        )


def _packed(members: Collection[LiveFile], limits: RewriteLimits) -> int:
    """Return how many files neighbours become when packed; fixed and full files stay."""
    small = [f for f in members if not f.is_fixed and f.live_bytes < limits.full_bytes]
    live_bytes = sum(file.live_bytes for file in small)
    return len(members) - len(small) + -(-live_bytes // limits.target_bytes)


def _cost_after(
    files: Collection[LiveFile], deletes: Collection[LiveDeletes], plan: RewritePlan
) -> ReadCost:
    """Return the cost of a read after the plan's rewrites."""
    groups, merges = plan.groups, plan.merges
    data = len(files) + sum(group.outputs - len(group.files) for group in groups)
    delete_files = len(deletes) - len(plan.dropped)
    for merge in merges:
        paths = frozenset[str]().union(*(file.data_paths for file in merge)) & plan.live_paths
        delete_files += merged_deletes(len(paths)) - len(merge)
    rows = sum(file.row_count for file in files)
    rows -= sum(file.deleted_rows for group in groups for file in group.files)
    return ReadCost(data + delete_files, rows)
