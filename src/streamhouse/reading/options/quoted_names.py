"""Names in backticks, with any content, as in Spark's SQL and in this format's options."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["quoted", "quoted_list"]


def quoted(name: str) -> str:
    """Return a name in backticks, with doubled backticks inside."""
    return "`" + name.replace("`", "``") + "`"


def quoted_list(names: Iterable[str]) -> str:
    """Return names in the notation of options like `columns`; `parse_names` reads the list."""
    return ",".join(map(quoted, names))
