"""`streamhouse tables --sizes`: bytes on the service's disk, in the lake, and there twice."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from streamhouse.cli.tables import states_of_tables
from streamhouse.connector.lake.lake_planner import open_lake_table
from streamhouse.storage_service.client import StorageClient
from streamhouse.storage_service.model.lake import LakeRole, LakeState, SideLakeState
from streamhouse.storage_service.model.table_sizes import TableSizes
from streamhouse.storage_service.model.table_state import TableState

__all__ = ["sizes_overview"]

_HEADINGS = ("hot", "cold", "doubled", "lake rows", "lake / log, a row")
_UNIT = 1024


def sizes_overview(client: StorageClient) -> Group:
    """Return every table's bytes, and what they come to."""
    overview = Table(
        caption="hot: log and rows by key. cold: the lake. doubled: log that the lake has, and lake"
        " tables beside the rows' own."
    )
    overview.add_column("table", no_wrap=True)
    for heading in _HEADINGS:
        overview.add_column(heading, justify="right")
    totals = [0, 0, 0]
    states, damaged = states_of_tables(client)
    for state in states:
        path = str(state.table.path)
        sizes = client.table_sizes(path)
        for name, known in _lake_tables(state):
            cold, rows = _in_lake(client, name, known)
            if name == path:
                bytes_of = (sizes.hot_bytes, cold, sizes.doubled_bytes)
            else:
                # Its rows are in the log or in the rows' own lake table, or were.
                bytes_of = (0, cold, cold)
            totals = [total + more for total, more in zip(totals, bytes_of, strict=True)]
            ratio = _ratio(state, sizes, cold, rows)
            overview.add_row(name, *(_text(size) for size in bytes_of), f"{rows:,}", ratio)
    overview.add_section()
    overview.add_row("all", *(_text(size) for size in totals), "", "")
    return Group(overview, *damaged)


def _lake_tables(state: TableState) -> list[tuple[str, LakeState | SideLakeState]]:
    """Return what is registered of each lake table, by its name; the rows' own first."""
    path, lake = str(state.table.path), state.lake
    sides = ((LakeRole.BATCH, lake.batch), (LakeRole.CHANGES, lake.changelog))
    beside = [(role.lake_name(path), known) for role, known in sides if known is not None]
    return [(path, lake), *beside]


def _in_lake(client: StorageClient, name: str, known: LakeState | SideLakeState) -> tuple[int, int]:
    """Return bytes and rows of the current lake snapshot, position deletes included."""
    if known.snapshot_id is None:
        return 0, 0
    lake = open_lake_table(client.lake_catalog(), name, table_uuid=known.table_uuid)
    for snapshot in lake.snapshots():
        if snapshot["is_current"]:
            properties = snapshot["properties"]
            return int(properties["total-files-size"]), int(properties["total-records"])
    return 0, 0


def _ratio(state: TableState, sizes: TableSizes, cold: int, lake_rows: int) -> str:
    """Return how large a row is in the lake, measured by one in the log."""
    log_rows = sum(p.high_watermark - p.log_start_offset for p in state.positions.values())
    log_bytes = sum(bucket.log_bytes for bucket in sizes.buckets.values())
    if not (log_rows and log_bytes and lake_rows):
        return ""
    return f"{cold / lake_rows / (log_bytes / log_rows):.2f}"


def _text(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < _UNIT:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= _UNIT
    return f"{size:,.1f} TiB"
