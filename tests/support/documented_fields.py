"""The fields of what commands print with `--json`, as docs/configuration.md says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

__all__ = ["documented"]

_DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def documented(command: str) -> list[str]:
    """Return the fields of a command's document, or of what its list has."""
    lines = _DOCUMENT.read_text(encoding="utf-8").splitlines()
    row = next(line for line in lines if line.startswith(f"| `{command}` |"))
    return re.findall(r"`(\w+)`", row.split("|")[-2])
