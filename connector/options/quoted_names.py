"""Names as Spark's SQL and this format's options have them: in backticks, whatever is in them."""

from __future__ import annotations

__all__ = ["quoted"]


def quoted(name: str) -> str:
    """Return a name in backticks, those in it doubled."""
    return "`" + name.replace("`", "``") + "`"
