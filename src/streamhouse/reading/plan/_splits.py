"""From one state of a table to splits: pure decisions, without files, connections or clocks.

Invariants:
- every requested offset is in exactly one piece
- cuts fall on file, row group and offset borders, so nothing is read twice
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from streamhouse.core.model.offsets import OffsetRange
from streamhouse.reading.options.options import ReadOptions
from streamhouse.reading.scan.scan import LakeFile, LakePiece, LogPiece, Piece, RowsPiece, Split

__all__ = ["SplitSizes", "lake_pieces", "log_pieces", "one_split_a_bucket", "pack", "total_weight"]

LOG_ROW_BYTES: Final = 64
"""What a log row counts when splits are balanced against lake files: typical, not measured."""

FILE_OPEN_BYTES: Final = 512 << 10
"""What opening one more file costs, in bytes read instead."""

LOG_PART_ROWS: Final = 8_192
"""A log range is cut at multiples of this: finer would fetch more stored batches twice."""

SPLIT_BYTES_MIN: Final = 4 << 20
"""A task of its own costs about 25 ms, in which this much is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSizes:
    """How large splits should be: at most `max_split_bytes`, and about `min_partitions` of them."""

    max_split_bytes: int
    min_partitions: int

    @classmethod
    def of(cls, options: ReadOptions) -> SplitSizes:
        """Return the sizes of a read: by default twice as many splits as the driver has cores."""
        # Twice, so that a core that is done early takes another split.
        splits_min = options.min_partitions or 2 * (os.cpu_count() or 2)
        return cls(max_split_bytes=options.max_split_bytes, min_partitions=splits_min)

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
    """Return one piece a file; rows are checked only where the file's bounds do not decide."""
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
                bucket=file.bucket,
                offset_start=file.offset_start,
                offset_end=file.offset_end,
                name_mapping=file.name_mapping,
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
    offsets = ranges.get(file.bucket)
    if offsets is None or offsets.end <= start or end <= offsets.start:
        return ()
    return None if offsets.start <= start and end <= offsets.end else (offsets,)


def log_pieces(ranges: Mapping[int, OffsetRange], *, is_ordered: bool = False) -> list[LogPiece]:
    """Return one piece a bucket; an ordered one is not cut."""
    return [
        LogPiece(bucket=r.bucket, start=r.start, end=r.end, is_ordered=is_ordered)
        for _, r in sorted(ranges.items())
        if r.start < r.end
    ]


def total_weight(pieces: Iterable[Piece]) -> int:
    """Return the bytes to read, opening files included."""
    return sum(_weight(piece) for piece in pieces)


def pack(pieces: Sequence[Piece], sizes: SplitSizes) -> list[Split]:
    """Lay all pieces in a row and cut the row into splits of equal size, at the nearest borders.

    A split is one stretch of the row, which keeps the number of tasks that open a file small. The
    same pieces always make the same splits.
    """
    weights = [_weight(piece) for piece in pieces]
    total = sum(weights)
    count = -(-total // sizes.target_bytes(total))
    cuts: list[tuple[int, Piece, int, int]] = []
    position = 0
    for piece, weight in zip(pieces, weights, strict=True):
        cuts += _cuts(piece, position, weight, total=total, count=count)
        position += weight
    contents: dict[int, list[Piece]] = {}
    for index, piece, start, end in cuts:
        contents.setdefault(index, []).append(piece.between(start, end))
    splits = []
    for _, parts in sorted(contents.items()):
        splits.append(Split(tuple(parts)))
    return splits


def one_split_a_bucket(pieces: Sequence[Piece]) -> list[Split]:
    """Return splits with all pieces of one bucket each, by offset, for a task to read in order.

    If a file may have rows of several buckets, one split has all pieces.
    """
    by_bucket: dict[int | None, list[LakePiece | LogPiece]] = {}
    placed = [piece for piece in pieces if not isinstance(piece, RowsPiece)]
    is_mixed = any(piece.bucket is None for piece in placed)
    for piece in placed:
        by_bucket.setdefault(None if is_mixed else piece.bucket, []).append(piece)
    splits = []
    for bucket_pieces in by_bucket.values():
        bucket_pieces.sort(key=_first_offset)
        splits.append(Split(tuple(bucket_pieces)))
    return splits


def _first_offset(piece: LakePiece | LogPiece) -> tuple[bool, int]:
    """Sort the lake before the log, which follows it."""
    if isinstance(piece, LogPiece):
        return True, piece.start
    return False, piece.offset_start or 0


def _weight(piece: Piece) -> int:
    if isinstance(piece, LakePiece):
        return piece.end_byte - piece.start_byte + FILE_OPEN_BYTES
    rows = piece.end - piece.start if isinstance(piece, LogPiece) else piece.row_count
    return max(1, rows) * LOG_ROW_BYTES


def _cuts(
    piece: Piece, position: int, weight: int, *, total: int, count: int
) -> Iterator[tuple[int, Piece, int, int]]:
    """Yield the parts of a piece at `position`: split, piece, start and end."""
    borders = _borders(piece)
    origin = borders[0]
    size = borders[-1] - origin
    scale = weight / size if size else 0
    part_start = origin
    split_before: int | None = None
    for start, end in itertools.pairwise(borders):
        middle = (start + end) / 2
        split = min(count - 1, int((position + (middle - origin) * scale) * count / total))
        if split_before is not None and split != split_before:
            yield split_before, piece, part_start, start
            part_start = start
        split_before = split
    yield split_before or 0, piece, part_start, borders[-1]


def _borders(piece: Piece) -> Sequence[int]:
    """Return the possible cuts of a piece, start and end included, in bytes or offsets."""
    if isinstance(piece, LakePiece):
        inside = (s for s in piece.row_group_starts if piece.start_byte < s < piece.end_byte)
        # The first row group starts after the file's magic, which belongs to it.
        return [piece.start_byte, *itertools.islice(inside, 1, None), piece.end_byte]
    if isinstance(piece, LogPiece) and not piece.is_ordered:
        return [*range(piece.start, piece.end, LOG_PART_ROWS), piece.end]
    return [piece.start, piece.end] if isinstance(piece, LogPiece) else [0, 1]
