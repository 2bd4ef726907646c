"""Where subscriptions begin: what a caller gives, as offsets of each table's buckets."""

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
"""Where the subscription to one table's log begins, besides times and JSON text."""

_WHAT: Final = "subscribe: start"


def starts_of(path: str | Sequence[str], start: Any) -> dict[str, Any]:
    """Return each table's start: `start` is that of all, or of several tables path -> start.

    What is JSON text is a dict in what is returned.
    """
    start = from_json_text(start, name=_WHAT)
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
    if given.keys() != set(paths) or len(given) != len(start):
        raise InvalidRequestError(
            "subscribe: of several tables start is one for all of them, or a dict with each of them"
            f" once ({', '.join(paths)}), not with {', '.join(map(repr, given)) or 'none'}"
        )
    return {table: from_json_text(given[table], name=_WHAT) for table in paths}


class Starts(NamedTuple):
    """Bucket -> offset where reading starts; `anew` has those that nobody has read up to."""

    offsets: dict[int, int]
    anew: dict[int, int]


def offsets_of(
    start: Any,
    positions: Callable[[], Mapping[int, BucketPositions]],
    *,
    at_time: Callable[[int], Mapping[int, int]],
    committed: Mapping[int, int] | None,
) -> Starts:
    """Return where one table's subscription starts, given where its buckets stand.

    A bucket of which nothing is committed begins with the log's oldest row.
    """
    if start == "committed":
        oldest = _oldest(positions())
        return Starts(oldest, oldest) if committed is None else Starts(oldest | {**committed}, {})
    given = parse_starting_offsets(start, name=_WHAT, words="full, earliest, latest, committed")
    if given.kind == "full":
        raise InvalidRequestError(f"{_WHAT}='full' reads the lake, too: StreamhouseClient does")
    if given.kind == "offsets":
        return _resolved(given.offsets, positions)
    if given.timestamp_us is not None:
        found = dict(at_time(given.timestamp_us))
    else:
        found = (_newest if given.kind == "latest" else _oldest)(positions())
    return Starts(found, found)


def _resolved(
    given: Mapping[int, int], positions: Callable[[], Mapping[int, BucketPositions]]
) -> Starts:
    """Return the offsets with `earliest` and `latest` as they are now."""
    words = {bucket: offset for bucket, offset in given.items() if offset in (EARLIEST, LATEST)}
    if not words:
        return Starts(dict(given), {})
    at = positions()
    named = {EARLIEST: _oldest(at), LATEST: _newest(at)}
    # A bucket that does not exist is refused when it is read.
    anew = {bucket: named[word].get(bucket, 0) for bucket, word in words.items()}
    return Starts({**given, **anew}, anew)


def _oldest(positions: Mapping[int, BucketPositions]) -> dict[int, int]:
    return {bucket: at.log_start_offset for bucket, at in positions.items()}


def _newest(positions: Mapping[int, BucketPositions]) -> dict[int, int]:
    return {bucket: at.high_watermark for bucket, at in positions.items()}


def _path(path: str) -> str:
    return str(TablePath.parse(path))
