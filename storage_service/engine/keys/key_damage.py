"""The mark that rows by key are damaged: among their files, so that it goes when they go.

Damage is met when a file is read, which may be long after the start. The mark tells the next start
of it, which makes the rows again rather than meet it once more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from streamhouse.storage_service.engine.directory.durable_json import read_json, replace_json
from streamhouse.storage_service.errors import CorruptDataError

__all__ = ["Damage", "damage_of", "mark_damaged"]

_FILE: Final = "damaged.json"


class Damage(NamedTuple):
    """What is wrong with the rows, and up to where they were known to have the changelog."""

    reason: str
    applied_offset: int = 0


def mark_damaged(rows: Path, reason: str, *, applied_offset: int) -> None:
    """Mark the rows at `rows`; durable on return."""
    replace_json(rows / _FILE, {"reason": reason, "applied_offset": applied_offset})


def damage_of(rows: Path) -> Damage | None:
    """Return how the rows at `rows` were marked; None if they were not."""
    file = rows / _FILE
    if not file.exists():
        return None
    try:
        mark = read_json(file)
        return Damage(
            f"the rows by key are damaged ({mark['reason']})", int(mark["applied_offset"])
        )
    except (CorruptDataError, KeyError, TypeError, ValueError):
        # That there is one says enough.
        return Damage(f"the rows by key are damaged, as {file} says")
