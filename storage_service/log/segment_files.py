"""The names of a log's files: the base offset in twenty digits, so that they sort as offsets."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

__all__ = ["index_path", "offsets_of", "segment_path", "writers_path"]

_NAME: Final = re.compile(r"(\d{20})(\.log|\.index|\.writers)")


def segment_path(directory: Path, base_offset: int) -> Path:
    """Return where the segment starting at `base_offset` lives."""
    return directory / f"{base_offset:020d}.log"


def index_path(directory: Path, base_offset: int) -> Path:
    """Return where that segment's index lives once it is sealed."""
    return directory / f"{base_offset:020d}.index"


def writers_path(directory: Path, offset: int) -> Path:
    """Return where the writer state before `offset` lives."""
    return directory / f"{offset:020d}.writers"


def offsets_of(names: Iterable[str], suffix: str) -> list[int]:
    """Return the offsets in the names that end in `suffix`, ascending; other names are ignored."""
    matches = (_NAME.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match and match[2] == suffix)
