"""Where subscriptions begin: the caller's `start`, resolved to offsets of each table's buckets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from streamhouse.client.following.subscription import TABLES_MAX
from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.offsets import BucketPositions
from streamhouse.core.model.table import TablePath
from streamhouse.core.model.values.positions import (
    EARLIEST,
    LATEST,
    from_json_text,
    parse_starting_offsets,
)

__all__ = ["LogStart", "Starts", "offsets_of", "starts_of"]

LogStart: TypeAlias = Literal["latest", "earliest", "committed"] | Mapping[int, int | str]
"""The start of a subscription to one table's log, besides times and JSON text."""

_ARGUMENT: Final = "subscribe: start"


def starts_of(path: str | Sequence[str], start: Any) -> dict[str, Any]:
    """Return path -> start: `start` is for all tables, or of several tables itself path -> start.

    JSON text is returned as a dict.
    """
    start = from_json_text(start, name=_ARGUMENT)
    if isinstance(path, str):
        return {_path(path): start}
    paths = [_path(name) for name in path]
    if len(set(paths)) != len(paths) or not 0 < len(paths) <= TABLES_MAX:
        raise InvalidRequestError(
            f"subscribe: name 1 to {TABLES_MAX} tables, each once, not {len(paths)}"
            + (f", {len(set(paths))} of them different" if paths else "")
        )
    if not isinstance(start, Mapping):
        return dict.fromkeys(paths, start)
    start_by_table = {
        _path(table) if isinstance(table, str) else table: s for table, s in start.items()
    }
    if start_by_table.keys() != set(paths) or len(start_by_table) != len(start):
        raise InvalidRequestError(
            "subscribe: of several tables start is one for all of them, or a dict with each of them"
            f" once ({', '.join(paths)}), not with {', '.join(map(repr, start_by_table)) or 'none'}"
        )
    return {table: from_json_text(start_by_table[table], name=_ARGUMENT) for table in paths}


class Starts(NamedTuple):
    """Bucket -> offset where reading starts; `fresh` has the buckets without an earlier reader."""

    offsets: dict[int, int]
    fresh: dict[int, int]


def offsets_of(
    start: Any,
    positions: Callable[[], Mapping[int, BucketPositions]],
    *,
    at_time: Callable[[int], Mapping[int, int]],
    committed: Mapping[int, int] | None,
) -> Starts:
    """Return the start of one table's subscription, resolved by the present positions.

    A bucket without a committed offset begins with the log's oldest row.
    """
    if start == "committed":
        oldest = _oldest(positions())
        return Starts(oldest, oldest) if committed is None else Starts(oldest | {**committed}, {})
    parsed = parse_starting_offsets(
        start, name=_ARGUMENT, words="full, earliest, latest, committed"
    )
    if parsed.kind == "full":
        raise InvalidRequestError(f"{_ARGUMENT}='full' reads the lake, too: StreamhouseClient does")
    if parsed.kind == "offsets":
        return _resolved(parsed.offsets, positions)
    if parsed.timestamp_us is not None:
        offsets = dict(at_time(parsed.timestamp_us))
    else:
        offsets = (_newest if parsed.kind == "latest" else _oldest)(positions())
    return Starts(offsets, offsets)


def _resolved(
    offset_of_bucket: Mapping[int, int], positions: Callable[[], Mapping[int, BucketPositions]]
) -> Starts:
    """Return the offsets with `earliest` and `latest` resolved now."""
    words = {
        bucket: offset
        for bucket, offset in offset_of_bucket.items()
        if offset in (EARLIEST, LATEST)
    }
    if not words:
        return Starts(dict(offset_of_bucket), {})
    current = positions()
    resolved_words = {EARLIEST: _oldest(current), LATEST: _newest(current)}
    # A bucket that does not exist is refused by the first read.
    fresh = {bucket: resolved_words[word].get(bucket, 0) for bucket, word in words.items()}
    return Starts({**offset_of_bucket, **fresh}, fresh)


def _oldest(positions: Mapping[int, BucketPositions]) -> dict[int, int]:
    return {bucket: position.log_start_offset for bucket, position in positions.items()}


def _newest(positions: Mapping[int, BucketPositions]) -> dict[int, int]:
    return {bucket: position.high_watermark for bucket, position in positions.items()}


def _path(path: str) -> str:
    return str(TablePath.parse(path))
