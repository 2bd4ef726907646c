"""From one state of a table to splits: pure decisions, no file, no connection, no clock.

Invariants:
- every wanted offset is in exactly one piece
- cuts fall on file, row group and offset borders, so nothing is read twice
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from streamhouse.connector.scan import LakeFile, LakePiece, LogPiece, Piece, Split
from streamhouse.storage_service.model.offsets import OffsetRange

__all__ = ["SplitSizes", "lake_pieces", "log_pieces", "pack", "total_weight"]

LOG_ROW_BYTES: Final = 64
"""What a log row counts when splits are balanced against lake files: typical, not measured."""

FILE_OPEN_BYTES: Final = 512 << 10
"""What opening one more file costs, in bytes read instead."""

SPLIT_BYTES_MIN: Final = 4 << 20
"""A task of its own costs about 25 ms, in which this much is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSizes:
    """How large splits should be: at most `max_split_bytes`, and about `min_partitions` of them."""

    max_split_bytes: int
    min_partitions: int

    def target_bytes(self, total: int) -> int:
        """Return the size to aim at when `total` bytes are read."""
        fair = -(-total // self.min_partitions)
        return max(min(self.max_split_bytes, fair), min(SPLIT_BYTES_MIN, self.max_split_bytes))


def lake_pieces(
    files: Iterable[LakeFile],
    ranges: Mapping[int, OffsetRange] | None,
    *,
    from_timestamp_us: int | None,
    to_timestamp_us: int | None,
) -> list[LakePiece]:
    """Return one piece a file; rows are checked only where its bounds do not settle it."""
    pieces = []
    for file in files:
        checked = None if ranges is None else _ranges_to_check(file, ranges)
        if checked is not None and not checked:
            continue
        low, high = file.timestamp_min_us, file.timestamp_max_us
        pieces.append(
            LakePiece(
                path=file.path,
                file_bytes=file.file_bytes,
                start_byte=0,
                end_byte=max(file.file_bytes, 1),
                row_count=file.row_count,
                ranges=checked,
                check_timestamp=(
                    from_timestamp_us is not None and (low is None or low < from_timestamp_us)
                )
                or (to_timestamp_us is not None and (high is None or high >= to_timestamp_us)),
                deletes=file.deletes,
                constants=file.constants,
                row_group_starts=file.row_group_starts,
            )
        )
    return pieces


def _ranges_to_check(
    file: LakeFile, ranges: Mapping[int, OffsetRange]
) -> tuple[OffsetRange, ...] | None:
    """Return the ranges whose rows to pick from the file; None when every row is wanted."""
    start, end = file.offset_start, file.offset_end
    if file.bucket is None or start is None or end is None:
        return tuple(ranges.values())
    wanted = ranges.get(file.bucket)
    if wanted is None or wanted.end <= start or end <= wanted.start:
        return ()
    return None if wanted.start <= start and end <= wanted.end else (wanted,)


def log_pieces(ranges: Mapping[int, OffsetRange]) -> list[LogPiece]:
    """Return one piece a bucket."""
    return [
        LogPiece(bucket=r.bucket, start=r.start, end=r.end)
        for _, r in sorted(ranges.items())
        if r.row_count
    ]


def total_weight(pieces: Iterable[Piece]) -> int:
    """Return the bytes to read, opening files included."""
    return sum(_weight(piece) for piece in pieces)


def pack(pieces: Sequence[Piece], sizes: SplitSizes) -> list[Split]:
    """Cut large pieces and put small ones together into splits of similar size.

    The same pieces always make the same splits.
    """
    target = sizes.target_bytes(total_weight(pieces))
    cut = [part for piece in pieces for part in _cut(piece, target)]
    if not cut:
        return []
    bins = -(-total_weight(cut) // target)
    # Largest first, each into the lightest split so far: close to even for any mix of sizes.
    heap: list[tuple[int, int]] = [(0, index) for index in range(bins)]
    contents: list[list[int]] = [[] for _ in range(bins)]
    for index in sorted(range(len(cut)), key=lambda i: (-_weight(cut[i]), i)):
        weight, lightest = heapq.heappop(heap)
        contents[lightest].append(index)
        heapq.heappush(heap, (weight + _weight(cut[index]), lightest))
    return [Split(tuple(cut[i] for i in sorted(indexes))) for indexes in contents if indexes]


def _weight(piece: Piece) -> int:
    if isinstance(piece, LakePiece):
        return piece.end_byte - piece.start_byte + FILE_OPEN_BYTES
    return max(1, piece.row_count) * LOG_ROW_BYTES


def _cut(piece: Piece, target: int) -> Iterator[Piece]:
    if isinstance(piece, LakePiece):
        yield from _cut_file(piece, target)
    elif isinstance(piece, LogPiece):
        parts = max(1, round(piece.row_count * LOG_ROW_BYTES / target))
        borders = [piece.start + piece.row_count * part // parts for part in range(parts + 1)]
        for start, end in itertools.pairwise(borders):
            yield LogPiece(bucket=piece.bucket, start=start, end=end)
    else:
        yield piece


def _cut_file(piece: LakePiece, target: int) -> Iterator[LakePiece]:
    """Cut where row groups start, each part about `target` bytes; without their starts, nowhere."""
    size = piece.end_byte - piece.start_byte
    parts = round(size / target)
    starts = [s for s in piece.row_group_starts[1:] if piece.start_byte < s < piece.end_byte]
    if parts < 2 or not starts:
        yield piece
        return
    wanted = size / parts
    begin = piece.start_byte
    for position, start in enumerate(starts):
        following = starts[position + 1] if position + 1 < len(starts) else piece.end_byte
        # Cut before the row group that would carry the part further past its size than short.
        if start - begin + (following - start) / 2 >= wanted:
            yield piece.between(begin, start)
            begin = start
    yield piece.between(begin, piece.end_byte)
