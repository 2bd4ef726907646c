"""Which options a read of any Iceberg table (`db.table$iceberg`) understands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from streamhouse.connector.options.connection import TableName
from streamhouse.storage_service.errors import InvalidRequestError

__all__ = ["SKIP_OPTIONS", "check_source_options"]

SKIP_OPTIONS: Final = ("streaming-skip-overwrite-snapshots", "streaming-skip-delete-snapshots")
_OPTIONS: Final = (
    "columns",
    "where",
    "startingOffsets",
    "asOfSnapshot",
    "minPartitions",
    "maxSplitBytes",
    "maxOffsetsPerTrigger",
    "longPollMs",
    *SKIP_OPTIONS,
)


def check_source_options(
    given: Mapping[str, str], read_options: Iterable[str], name: TableName
) -> None:
    """Raise `InvalidRequestError` for those of `read_options`, which are `given`, that are about
    logs or our own lake tables.
    """
    for key in read_options:
        if key not in _OPTIONS:
            raise InvalidRequestError(
                f"option '{key}' has no meaning for '{name}', which may be anybody's Iceberg"
                f" table; its options: {', '.join(_OPTIONS)}"
            )
    if given.get("startingoffsets", "full").strip().lower() not in ("full", "latest"):
        raise InvalidRequestError(
            f"option 'startingOffsets' of '{name}' is 'full' (the current snapshot's rows, then"
            f" appends) or 'latest' (only what is appended from now on), not"
            f" '{given['startingoffsets']}'"
        )
