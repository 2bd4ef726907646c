"""The lines that tell how a service has started, below its ready line."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["start_lines"]

_TIERING_OFF: Final = (
    "off: rows stay in the log; start with --tiering embedded, or run 'streamhouse tier' beside it"
)
_TIERING_ON: Final = "embedded: this process moves rows into Iceberg"


def start_lines(endpoint: str, data_dir: Path, *, is_tiering: bool) -> str:
    """Return page, data directory and tiering, a line each."""
    return (
        f"  page: {endpoint}/\n"
        f"  data: {data_dir.absolute()}\n"
        f"  tiering: {_TIERING_ON if is_tiering else _TIERING_OFF}"
    )
