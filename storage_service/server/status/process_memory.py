"""The resident memory of processes."""

from __future__ import annotations

import resource
from pathlib import Path

__all__ = ["resident_bytes"]


def resident_bytes(process: int | str = "self") -> int | None:
    """Return the resident memory of a process, by its id; None if the system does not report it."""
    # prometheus_client's collector also counts the open files: milliseconds with many tables.
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text("ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * resource.getpagesize()
