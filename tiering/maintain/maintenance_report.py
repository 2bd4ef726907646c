"""The plan and the report of a lake table's maintenance, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from streamhouse.lake.commits.expiry import Expired
from streamhouse.lake.commits.orphans import OrphansRemoved
from streamhouse.lake.snapshots.inventory import Inventory, LiveFile
from streamhouse.tiering.maintain._maintenance_plan import RewritePlan
from streamhouse.tiering.maintain._removal import Removed
from streamhouse.tiering.maintain._rewrite import Rewritten

__all__ = [
    "MaintenancePlan",
    "MaintenanceReport",
    "plan_json",
    "plan_text",
    "report_json",
    "report_text",
]

_LONE_FILES_MIN: Final = 64
_NOT_REMOVED: Final = Removed(snapshot_id=0, files=0, rows=0, size_bytes=0)
_NOT_REWRITTEN: Final = Rewritten(
    snapshot_id=0,
    files_before=0,
    files_after=0,
    deletes_before=0,
    deletes_after=0,
    rows=0,
    rows_dropped=0,
    bytes_read=0,
    bytes_written=0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenancePlan:
    """The steps that maintenance would run now; `removable` are files of rows past their age.

    `lone_files` counts small files that stay: each is the only file of its partition and bucket.
    """

    inventory: Inventory | None
    removable: tuple[LiveFile, ...]
    rewrite: RewritePlan
    snapshots: int
    expirable: int
    orphans: int
    orphan_bytes: int
    lone_files: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceReport:
    """The steps that maintenance ran; with `has_more` its limits left work undone.

    `lone_files` counts small files that stay: each is the only file of its partition and bucket.
    """

    removed: Removed | None = None
    rewritten: Rewritten | None = None
    expired: Expired = field(default_factory=Expired)
    orphans: OrphansRemoved = field(default_factory=OrphansRemoved)
    has_more: bool = False
    lone_files: int = 0


def plan_text(path: str, plan: MaintenancePlan) -> str:
    """Return a plan as lines for people."""
    inventory, rewrite = plan.inventory, plan.rewrite
    if inventory is None:
        return f"{path}: the lake table is empty"
    size = sum(file.size_bytes for file in inventory.files)
    merged = sum(len(group.files) for group in rewrite.groups)
    deletes = sum(len(merge) for merge in rewrite.merges)
    sequel = ", and more after that" if rewrite.has_more else ""
    removal = []
    if plan.removable:
        rows = sum(file.row_count - file.deleted_rows for file in plan.removable)
        removal = [f"  remove {len(plan.removable):,} files of {rows:,} rows that are too old"]
    return "\n".join(
        [
            f"{path}: {len(inventory.files):,} data files ({_size(size)}),"
            f" {len(inventory.deletes):,} delete files, {plan.snapshots:,} snapshots",
            *removal,
            f"  rewrite {merged:,} files into about {len(rewrite.groups):,}"
            f" ({_size(rewrite.size_bytes)} to read){sequel}",
            f"  merge {deletes:,} delete files, drop {len(rewrite.dropped):,} that hide nothing",
            f"  expire {plan.expirable:,} snapshots",
            f"  delete {plan.orphans:,} orphans ({_size(plan.orphan_bytes)})",
            *(f"  leave {why}" for why in _why_lone(plan.lone_files)),
        ]
    )


def plan_json(path: str, plan: MaintenancePlan) -> dict[str, Any]:
    """Return a plan as a document for programs."""
    files, deletes = (plan.inventory.files, plan.inventory.deletes) if plan.inventory else ((), ())
    return {
        "lake_table": path,
        "files": len(files),
        "file_bytes": sum(file.size_bytes for file in files),
        "delete_files": len(deletes),
        "snapshots": plan.snapshots,
        "files_too_old": len(plan.removable),
        "files_to_rewrite": sum(len(group.files) for group in plan.rewrite.groups),
        "rewritten_bytes": plan.rewrite.size_bytes,
        "delete_files_to_merge": sum(len(merge) for merge in plan.rewrite.merges),
        "delete_files_to_drop": len(plan.rewrite.dropped),
        "snapshots_to_expire": plan.expirable,
        "orphans": plan.orphans,
        "orphan_bytes": plan.orphan_bytes,
        "has_more": plan.rewrite.has_more,
    }


def report_json(path: str, report: MaintenanceReport) -> dict[str, Any]:
    """Return a pass's report as a document for programs."""
    removed, rewritten = report.removed or _NOT_REMOVED, report.rewritten or _NOT_REWRITTEN
    return {
        "lake_table": path,
        "removed_files": removed.files,
        "removed_rows": removed.rows,
        "removed_bytes": removed.size_bytes,
        "files_before": rewritten.files_before,
        "files_after": rewritten.files_after,
        "read_bytes": rewritten.bytes_read,
        "written_bytes": rewritten.bytes_written,
        "deleted_rows": rewritten.rows_dropped,
        "delete_files_before": rewritten.deletes_before,
        "delete_files_after": rewritten.deletes_after,
        "expired_snapshots": report.expired.snapshots,
        "expired_files": report.expired.files,
        "orphans": report.orphans.files,
        "orphan_bytes": report.orphans.size_bytes,
        "has_more": report.has_more,
    }


def report_text(path: str, report: MaintenanceReport) -> str:
    """Return a pass's report as one line for people."""
    parts = []
    if (removed := report.removed) is not None:
        parts.append(
            f"{removed.rows:,} rows that were too old removed"
            f" ({removed.files:,} files, {_size(removed.size_bytes)})"
        )
    if (rewritten := report.rewritten) is not None:
        parts.append(
            f"{rewritten.files_before:,} files became {rewritten.files_after:,}"
            f" ({_size(rewritten.bytes_read)} read, {_size(rewritten.bytes_written)} written,"
            f" {rewritten.rows_dropped:,} deleted rows dropped)"
        )
        if rewritten.deletes_before:
            parts.append(
                f"{rewritten.deletes_before:,} delete files became {rewritten.deletes_after:,}"
            )
    if report.expired.snapshots:
        parts.append(
            f"{report.expired.snapshots:,} snapshots expired"
            f" ({report.expired.files:,} files deleted)"
        )
    if report.orphans.files:
        parts.append(
            f"{report.orphans.files:,} orphans deleted ({_size(report.orphans.size_bytes)})"
        )
    parts = parts or ["nothing to do"]
    parts += (f"left are {why}" for why in _why_lone(report.lone_files))
    return f"{path}: {'; '.join(parts)}"


def _why_lone(count: int) -> list[str]:
    """Return why `count` small files stay, if the count is worth a word."""
    if count < _LONE_FILES_MIN:
        return []
    return [
        f"{count:,} small files, each the only one of its partition and bucket: files are packed"
        " only with others of the same; a partitioning with fewer values has fewer files"
    ]


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
