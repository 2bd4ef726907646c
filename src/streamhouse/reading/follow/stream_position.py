"""The position of a stream: one offset per bucket, as JSON in Spark's checkpoint.

The JSON is `{"version": 1, "table": "db.t", "table_id": 7, "offsets": {"0": 12, "1": 9}}`:
everything below an offset was read. A position names no tier: planning a range looks up the tier,
so a replay finds the same rows after a move. `consumer` is the default name under which the reader
reports its position. Positions of earlier releases have neither `consumer` nor `table`.

While a stream of a primary key table reads its initial rows, version 2 adds the lake snapshot of
the rows: `"bootstrap": {"snapshot_id": "42", "ends": {"0": 90, "1": 80}, "pin": "x"}`.

If the service may lose rows it has shown, the position has `"fingerprints": {"0": "1f0c..."}`, the
log's fingerprint at the bucket's offset. Positions without a fingerprint are valid, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from streamhouse.core.errors import (
    InvalidRequestError,
    OffsetOutOfRangeError,
)
from streamhouse.core.model.offsets import (
    buckets_to_json,
    check_positions,
    offsets_from_json,
)

__all__ = ["Bootstrap", "StreamPosition", "advance"]

POSITION_VERSION: Final = 1
BOOTSTRAP_VERSION: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap:
    """The lake snapshot at the start of a stream: its rows below `ends`, then changes.

    `pin` is the holder of the snapshot's pin, the same after a restart.
    """

    snapshot_id: int
    ends: Mapping[int, int]
    pin: str

    def to_json(self) -> dict[str, Any]:
        """Return the form Spark keeps; a snapshot id is a string because it exceeds 2**53."""
        return {
            "snapshot_id": str(self.snapshot_id),
            "ends": buckets_to_json(self.ends),
            "pin": self.pin,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Bootstrap:
        """Read what `to_json` wrote."""
        return cls(
            snapshot_id=int(value["snapshot_id"]),
            ends=offsets_from_json(value["ends"]),
            pin=str(value["pin"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """One offset per bucket of one table, and the bootstrap while rows of the bootstrap are unread.

    `fingerprints` are fingerprints of the log at these offsets, for the buckets with a fingerprint.
    `table` is the table's name, `consumer` the reader's name; None in a position without the name.
    """

    table_id: int
    offsets: Mapping[int, int]
    bootstrap: Bootstrap | None = None
    fingerprints: Mapping[int, str] = field(default_factory=dict)
    table: str | None = None
    consumer: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the form Spark keeps; equal positions give equal JSON."""
        value: dict[str, Any] = {
            "version": POSITION_VERSION,
            **({} if self.table is None else {"table": self.table}),
            "table_id": self.table_id,
            "offsets": buckets_to_json(self.offsets),
            **({} if self.consumer is None else {"consumer": self.consumer}),
        }
        if self.bootstrap is not None:
            value |= {"version": BOOTSTRAP_VERSION, "bootstrap": self.bootstrap.to_json()}
        if self.fingerprints:
            value["fingerprints"] = {
                str(b): fingerprint for b, fingerprint in sorted(self.fingerprints.items())
            }
        return value

    def advanced(
        self,
        offsets: Mapping[int, int],
        fingerprint_at: Callable[[int, int], str | None] = lambda *_: None,
    ) -> StreamPosition:
        """Return the position at `offsets`; a bootstrap is over once all of its rows are read.

        `fingerprint_at` returns the fingerprint of a bucket at an offset, if there is one.
        """
        bootstrap = self.bootstrap
        if bootstrap is not None and all(
            offsets.get(bucket, 0) >= end for bucket, end in bootstrap.ends.items()
        ):
            bootstrap = None
        # A bucket that stays keeps what it has: the same position is the same JSON.
        fingerprints = {
            bucket: self.fingerprints.get(bucket)
            if offset == self.offsets.get(bucket)
            else fingerprint_at(bucket, offset)
            for bucket, offset in offsets.items()
        }
        return replace(
            self,
            offsets=offsets,
            bootstrap=bootstrap,
            fingerprints={
                bucket: fingerprint
                for bucket, fingerprint in fingerprints.items()
                if fingerprint is not None
            },
        )

    @classmethod
    def from_json(
        cls,
        value: Any,
        *,
        table: str,
        table_id: int,
        adopted_from: Mapping[int, Mapping[int, int]] | None = None,
    ) -> StreamPosition:
        """Read a position and check its table against the current table.

        `adopted_from` is the table's: a position of the adopted table is valid here as far as the
        table's rows were adopted. Raises `TableNotFoundError` when the table was dropped and
        created again, `OffsetOutOfRangeError` when the stream has read rows missing from the
        adoption, `InvalidRequestError` for a position of another table.
        """
        try:
            version = value["version"]
            if version not in (POSITION_VERSION, BOOTSTRAP_VERSION):
                raise InvalidRequestError(
                    f"table '{table}': the checkpoint's position has version {version}, but this"
                    f" Streamhouse reads versions {POSITION_VERSION} and {BOOTSTRAP_VERSION}; use"
                    " the one that wrote it"
                )
            bootstrap = value["bootstrap"] if version == BOOTSTRAP_VERSION else None
            position = cls(
                table_id=int(value["table_id"]),
                offsets=offsets_from_json(value["offsets"]),
                bootstrap=None if bootstrap is None else Bootstrap.from_json(bootstrap),
                fingerprints={
                    int(bucket): str(fingerprint)
                    for bucket, fingerprint in value.get("fingerprints", {}).items()
                },
                table=_text(value, "table"),
                consumer=_text(value, "consumer"),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidRequestError(
                f"table '{table}': {value!r} in the checkpoint is not a Streamhouse position"
            ) from error
        if position.table not in (None, table):
            raise InvalidRequestError(
                f"the checkpoint's position is of table '{position.table}', and this stream reads"
                f" '{table}': start it with the checkpoint of '{table}', or with a new one"
            )
        ends = (adopted_from or {}).get(position.table_id)
        if ends is not None:
            position.check_not_beyond(ends, table=table)
            # Its log is another one, which begins where the lake ended.
            return replace(position, table_id=table_id, fingerprints={})
        check_positions(
            position.offsets,
            stated_id=position.table_id,
            table=table,
            table_id=table_id,
            since="the stream's checkpoint was made",
            remedy="start with a new checkpoint",
        )
        return position

    def check_not_beyond(self, ends: Mapping[int, int], *, table: str) -> None:
        """Raise `OffsetOutOfRangeError` if the table lacks rows which were read.

        Acknowledged rows are lost in two cases only: the service got an older data directory, or
        another service adopted the lake table without the untiered rows.
        """
        for bucket, offset in sorted(self.offsets.items()):
            if offset > ends.get(bucket, 0):
                raise OffsetOutOfRangeError(
                    f"table '{table}', bucket {bucket}: the stream has read up to offset {offset},"
                    f" but the table has only {ends.get(bucket, 0)} of those; was an older copy of"
                    " the service's data restored, or its lake table adopted? start with a new"
                    " checkpoint"
                )


def _text(value: Mapping[str, Any], member: str) -> str | None:
    text = value.get(member)
    return None if text is None else str(text)


def advance(
    start: Mapping[int, int], available: Mapping[int, int], *, rows_max: int | None
) -> dict[int, int]:
    """Return how far to read: from `start` towards `available`, at most `rows_max` rows in all.

    The rows are spread fairly: no bucket waits for another's backlog, and a small backlog is read
    to its end. The result depends only on the arguments.
    """
    waiting = {
        bucket: available[bucket] - offset
        for bucket, offset in sorted(start.items())
        if available.get(bucket, offset) > offset
    }
    if rows_max is None or sum(waiting.values()) <= rows_max:
        return {b: offset + waiting.get(b, 0) for b, offset in start.items()}
    granted = dict.fromkeys(waiting, 0)
    remaining = rows_max
    hungry = list(waiting)
    while remaining >= len(hungry) > 0:
        share = min(remaining // len(hungry), min(waiting[b] - granted[b] for b in hungry))
        for bucket in hungry:
            granted[bucket] += share
        remaining -= share * len(hungry)
        hungry = [b for b in hungry if granted[b] < waiting[b]]
    if hungry:
        # Fewer rows than buckets: the turn moves on with every row ever read.
        first = sum(start.values()) % len(hungry)
        for bucket in (hungry[first:] + hungry[:first])[:remaining]:
            granted[bucket] += 1
    return {b: offset + granted.get(b, 0) for b, offset in start.items()}
