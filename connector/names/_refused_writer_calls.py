"""Calls of a writer without a meaning for a Streamhouse table: refused at the end of the write.

Spark asks a Python source about none of these calls. A batch fails with a sentence that names
nothing of ours, and a stream goes on without the call's effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from streamhouse.core.errors import UnsupportedError

__all__ = ["LAYOUT_CALLS", "check_layout", "check_mode"]

LAYOUT_CALLS: Final = {
    "partitionBy": "option partitioned.by, as in .option('partitioned.by', 'region, day(at)')",
    "bucketBy": "options bucket.num and bucket.key",
    "clusterBy": "option partitioned.by, or bucket.num and bucket.key",
}
"""The methods of Spark's writers for the layout of a table, and our replacement of each."""
_MODES: Final = ("append", "overwrite")


def check_layout(arguments: Mapping[str, Any]) -> None:
    """Refuse a layout by Spark's methods; `arguments` has the argument of each method."""
    for call, instead in LAYOUT_CALLS.items():
        if arguments.get(call):
            raise UnsupportedError(
                f"{call}: Spark passes this layout to no Python source; use {instead}, in the write"
                " that creates the table"
            )


def check_mode(mode: Any) -> None:
    """Refuse the modes that Spark passes to no Python source."""
    if str(mode).lower() not in _MODES:
        raise UnsupportedError(
            f"{f'mode {mode!r}' if mode else 'a write without a mode'}: a Streamhouse table is"
            " written by .mode('append'), which creates a missing table, or"
            " .mode('overwrite'), which replaces all rows"
        )
