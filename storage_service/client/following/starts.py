"""Where subscriptions begin: what a caller gives, as offsets of each table's buckets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from streamhouse.storage_service.client.following.subscription import TABLES_MAX
from streamhouse.storage_service.client.values.arguments import offsets
from streamhouse.storage_service.errors import InvalidRequestError
from streamhouse.storage_service.model.offsets import BucketPositions
from streamhouse.storage_service.model.table import TablePath

__all__ = ["LogStart", "offsets_of", "starts_of"]

LogStart: TypeAlias = Literal["latest", "earliest", "committed"] | Mapping[int, int]
"""Where the subscription to one table's log begins."""


def starts_of(path: str | Sequence[str], start: Any) -> dict[str, Any]:
    """Return each table's start: `start` is that of all, or of several tables path -> start."""
    if isinstance(path, str):
        return {_path(path): start}
    paths = [_path(one) for one in path]
    if len(set(paths)) != len(paths) or not 0 < len(paths) <= TABLES_MAX:
        raise InvalidRequestError(
            f"subscribe: name 1 to {TABLES_MAX} tables, each once, not {len(paths)}"
            + (f", {len(set(paths))} of them different" if paths else "")
        )
    if not isinstance(start, Mapping):
        return dict.fromkeys(paths, start)
    given = {_path(table) if isinstance(table, str) else table: s for table, s in start.items()}
    if given.keys() != set(paths):
        raise InvalidRequestError(
            "subscribe: of several tables start is one for all of them, or a dict with each of them"
            f" ({', '.join(paths)}), not with {', '.join(map(repr, given)) or 'none'}"
        )
    return {table: given[table] for table in paths}


def offsets_of(
    start: Any,
    positions: Callable[[], Mapping[int, BucketPositions]],
    *,
    committed: Mapping[int, int] | None,
) -> dict[int, int]:
    """Return bucket -> offset of one table's start, given where its buckets stand.

    A bucket of which nothing is committed begins with the log's oldest row.
    """
    if start == "latest":
        return {bucket: at.high_watermark for bucket, at in positions().items()}
    if start in ("earliest", "committed"):
        oldest = {bucket: at.log_start_offset for bucket, at in positions().items()}
        return oldest | dict(committed or {})
    if isinstance(start, Mapping):
        return offsets(start, what="subscribe: start")
    raise InvalidRequestError(
        "subscribe: start must be 'latest', 'earliest', 'committed' or bucket -> offset, not"
        f" {start!r}"
    )


def _path(path: str) -> str:
    return str(TablePath.parse(path))
