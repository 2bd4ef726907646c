"""Names as Spark's SQL and this format's options have them: in backticks, whatever is in them."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["quoted", "quoted_list"]


def quoted(name: str) -> str:
    """Return a name in backticks, those in it doubled."""
    return "`" + name.replace("`", "``") + "`"


def quoted_list(names: Iterable[str]) -> str:
    """Return names as an option such as `columns` lists them; `parse_names` reads them again."""
    return ",".join(map(quoted, names))
