"""Positions in a table: offsets, ranges of offsets, positions of buckets. Every end is exclusive.

An offset belongs to one table, for life; only `check_positions` decides whether an offset fits a
table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeVar

from streamhouse.core.errors import (
    InvalidRequestError,
    OffsetOutOfRangeError,
    TableNotFoundError,
)

__all__ = [
    "INCLUDED_HEADER",
    "ROLE_HEADER",
    "BucketPositions",
    "Offset",
    "OffsetRange",
    "buckets_to_json",
    "check_positions",
    "further",
    "offsets_from_json",
    "offsets_in",
    "ranges_in",
    "table_of_offsets",
    "truncated_offsets",
]

INCLUDED_HEADER: Final = b"x-included-offsets"
"""A header of an answer to `at_least`: bucket -> end of the changes that the answer includes."""
ROLE_HEADER: Final = b"x-role"
"""A header of a standby's answer with rows: `standby`."""

_T = TypeVar("_T")


class Offset(int):
    """An offset with the id of its table; otherwise a whole number.

    The service refuses an offset of a dropped table, even if a new table has the same name. An
    offset plus a number of rows is an offset of the same table.
    """

    table_id: int

    def __new__(cls, offset: int, table_id: int) -> Offset:
        """Return the offset `offset` of the table with this id."""
        # `super()` takes as long again, and each batch of a fetch has an offset.
        instance = int.__new__(cls, offset)
        instance.table_id = table_id
        return instance

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]
        """Return the arguments for a copy, also by pickle."""
        return int(self), self.table_id

    def __add__(self, rows: int) -> int:
        """Return the offset `rows` rows further."""
        further_on = int.__add__(self, rows)
        # For a number that is not whole, Python tries the right operand.
        return further_on if further_on is NotImplemented else Offset(further_on, self.table_id)


def offsets_in(table_id: int | None, offsets: Mapping[int, int]) -> dict[int, int]:
    """Return bucket -> offset with the table's id in each offset; unchanged without a table."""
    if table_id is None:
        return dict(offsets)
    return {bucket: Offset(offset, table_id) for bucket, offset in offsets.items()}


def ranges_in(
    table_id: int | None, ranges: Mapping[str, tuple[int, int]]
) -> dict[int, tuple[int, int]]:
    """Read bucket -> (start, end) from the JSON form, with the table's id in each offset."""
    if table_id is None:
        return {int(bucket): (int(start), int(end)) for bucket, (start, end) in ranges.items()}
    return {
        int(bucket): (Offset(start, table_id), Offset(end, table_id))
        for bucket, (start, end) in ranges.items()
    }


def table_of_offsets(offsets: Iterable[object], *, what: str) -> int | None:
    """Return the table id in the offsets; None for plain numbers.

    Raises `InvalidRequestError` for offsets of two tables.
    """
    ids = {offset.table_id for offset in offsets if isinstance(offset, Offset)}
    if len(ids) > 1:
        raise InvalidRequestError(
            f"{what}: the offsets are of two tables (table ids {', '.join(map(str, sorted(ids)))}):"
            " take all of them from one call"
        )
    return next(iter(ids), None)


def check_positions(
    offsets: Mapping[int, int],
    *,
    stated_id: int | None,
    table: str,
    table_id: int,
    adopted_from: Mapping[int, Mapping[int, int]] = MappingProxyType({}),
    since: str = "these offsets were read",
    remedy: str = "read it from its beginning",
) -> None:
    """Raise unless bucket -> offset are positions in the table with the name `table`.

    `stated_id` is the table id of the offsets. Offset 0 needs no table id: no row is below 0.
    `adopted_from` is the field of the table: offsets of an adopted table count as far as its rows
    were adopted. `since` and `remedy` are words for the error message.

    Raises:
        TableNotFoundError: the table was dropped and created again.
        OffsetOutOfRangeError: rows below an offset were not adopted.
        InvalidRequestError: the offsets have no table id.
    """
    if stated_id == table_id:
        return
    if stated_id is None:
        for bucket, offset in offsets.items():
            if offset > 0:
                raise InvalidRequestError(
                    f"table '{table}', bucket {bucket}: offset {offset} comes without table_id, and"
                    " may belong to an earlier table of this name: send the table_id that came with"
                    f" the offset (the current table has {table_id}); a client that sends no"
                    " table_id is older than this service"
                )
        return
    ends = adopted_from.get(stated_id)
    if ends is None:
        raise TableNotFoundError(
            f"table '{table}' was dropped and created again since {since} (table id {stated_id},"
            f" now {table_id}); {remedy}"
        )
    for bucket, offset in sorted(offsets.items()):
        if offset > ends.get(bucket, 0):
            raise OffsetOutOfRangeError(
                f"table '{table}', bucket {bucket}: offset {offset} was reached, but the table has"
                f" only the rows below {ends.get(bucket, 0)}: its lake table was adopted without"
                f" the later rows; {remedy}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetRange:
    """Offsets `start` (inclusive) to `end` (exclusive) of one bucket."""

    bucket: int
    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"not an offset range: [{self.start}, {self.end})")

    @property
    def row_count(self) -> int:
        """Rows in the range; offsets are dense."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPositions:
    """The positions of one bucket; the high watermark is the highest of the offsets.

    Rows below `truncated_offset` were overwritten and no longer belong to the table, in any tier.
    The log starts at `truncated_offset` or above. Rows below `expired_offset` are all in the lake
    and have reached `table.datalake.ttl`: every read leaves them out, even if a lake table or the
    log still has them.
    """

    log_start_offset: int
    high_watermark: int
    tiered_offset: int
    truncated_offset: int = 0
    expired_offset: int = 0

    @property
    def first_offset(self) -> int:
        """The offset where the bucket's rows begin."""
        return max(self.truncated_offset, self.expired_offset)

    def to_json(self) -> dict[str, int]:
        """Return the JSON form."""
        return {
            "log_start_offset": self.log_start_offset,
            "high_watermark": self.high_watermark,
            "tiered_offset": self.tiered_offset,
            "truncated_offset": self.truncated_offset,
            "expired_offset": self.expired_offset,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, table_id: int) -> BucketPositions:
        """Read the JSON form of a bucket, with the table's id in each offset."""
        return cls(
            log_start_offset=Offset(value["log_start_offset"], table_id),
            high_watermark=Offset(value["high_watermark"], table_id),
            tiered_offset=Offset(value["tiered_offset"], table_id),
            truncated_offset=Offset(value.get("truncated_offset", 0), table_id),
            expired_offset=Offset(value.get("expired_offset", 0), table_id),
        )


def truncated_offsets(positions: Mapping[int, BucketPositions]) -> dict[int, int]:
    """Return the first offsets of the buckets cut by an overwrite."""
    return {b: at.truncated_offset for b, at in positions.items() if at.truncated_offset}


def further(old: Mapping[int, int], new: Mapping[int, int]) -> dict[int, int]:
    """Return the further offset of each bucket in either mapping."""
    return {b: max(old.get(b, 0), new.get(b, 0)) for b in sorted({*old, *new})}


def buckets_to_json(values: Mapping[int, _T]) -> dict[str, _T]:
    """Return bucket -> value with text keys for JSON."""
    return {str(bucket): value for bucket, value in sorted(values.items())}


def offsets_from_json(value: Mapping[str, Any]) -> dict[int, int]:
    """Read bucket -> offset from its JSON form."""
    return {int(bucket): int(offset) for bucket, offset in value.items()}
