"""Which lake files to rewrite: small ones packed, deleted rows dropped, deletes merged. Pure.

Files of a bucket and partition are kept in offset order and only neighbours are merged: every file
stays a single range of the bucket. Sizes fall into classes, each 8 times the last. A run of
neighbours is merged once the run has `files_min` files of a class. A row is rewritten at most once
a class, and the number of files stays logarithmic in the number of rounds.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from streamhouse.lake.files.partition_layout import PartitionValues
from streamhouse.lake.files.position_deletes import FILE_SCOPED_MAX
from streamhouse.lake.snapshots.inventory import LiveDeletes, LiveFile

__all__ = [
    "RewriteGroup",
    "RewriteLimits",
    "RewritePlan",
    "merge_runs",
    "merged_deletes",
    "neighbours",
    "plan_rewrite",
]

_CLASS_FACTOR: Final = 8
_CLASSES: Final = 5
_FULL_SHARE: Final = 0.75
# The size of larger row groups after zstd can only be estimated.
_SIZE_SLACK: Final = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteLimits:
    """When files are worth rewriting, and how many bytes a rewrite reads.

    A plan has at least one group, however small `bytes_max` is. With `is_eager` all small
    neighbours are merged, of any size class. Files are not merged across slices of `slice_us`:
    old rows can leave file by file. A table has read debt (`_reads`) only with at least
    `excess_files_min` more files than the rows need.
    """

    target_bytes: int
    files_min: int = 8
    deletes_min: int = 8
    deleted_share_min: float = 0.2
    bytes_max: int = 512 << 20
    is_eager: bool = False
    slice_us: int | None = None
    excess_files_min: int = 64

    @property
    def full_bytes(self) -> int:
        """The smallest size of a file that need not be merged."""
        return int(self.target_bytes * _FULL_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteGroup:
    """Neighbours of a bucket and partition, to be merged into a few files of `file_bytes`."""

    spec_id: int
    partition: PartitionValues
    bucket: int
    files: tuple[LiveFile, ...]
    file_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes to read."""
        return sum(file.size_bytes for file in self.files)

    @property
    def outputs(self) -> int:
        """The approximate number of files after the rewrite."""
        live_bytes = sum(file.live_bytes for file in self.files)
        return -(-live_bytes // self.file_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewritePlan:
    """Each of `merges` becomes one delete file; `dropped` apply to no remaining data file.

    `has_more`: the limits left work undone.
    """

    groups: tuple[RewriteGroup, ...] = ()
    merges: tuple[tuple[LiveDeletes, ...], ...] = ()
    dropped: tuple[LiveDeletes, ...] = ()
    live_paths: frozenset[str] = field(default=frozenset(), repr=False)
    has_more: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether the plan has no work."""
        return not (self.groups or self.merges or self.dropped)

    @property
    def size_bytes(self) -> int:
        """Bytes of data files to read."""
        return sum(group.size_bytes for group in self.groups)


def plan_rewrite(
    files: Iterable[LiveFile], deletes: Iterable[LiveDeletes], limits: RewriteLimits
) -> RewritePlan:
    """Plan a rewrite of the files of a snapshot."""
    files = list(files)
    candidates = sorted(
        (
            group
            for members in neighbours(files, limits.slice_us)
            for group in _groups(members, limits)
        ),
        key=_bytes_per_gain,
    )
    chosen: list[RewriteGroup] = []
    remaining_bytes = limits.bytes_max
    for group in candidates:
        if chosen and group.size_bytes > remaining_bytes:
            continue
        chosen.append(group)
        remaining_bytes -= group.size_bytes
    rewritten = {file.path for group in chosen for file in group.files}
    staying = frozenset(file.path for file in files if file.path not in rewritten)
    dropped: list[LiveDeletes] = []
    applicable: list[LiveDeletes] = []
    for delete in deletes:
        (applicable if delete.data_paths & staying else dropped).append(delete)
    return RewritePlan(
        groups=tuple(chosen),
        merges=tuple(_delete_merges(applicable, staying, limits)),
        dropped=tuple(dropped),
        live_paths=staying,
        has_more=len(chosen) < len(candidates),
    )


def merge_runs(
    sizes: Sequence[int | None], *, full_bytes: int, files_min: int, is_eager: bool = False
) -> list[range]:
    """Return the runs of neighbours to merge, without overlap; a size of None ends a run."""
    classes = [
        None
        if size is None or size >= full_bytes
        else 0
        if is_eager
        else _size_class(size, full_bytes)
        for size in sizes
    ]
    runs: list[range] = []
    for size_class in range(1 if is_eager else _CLASSES):
        for run in _spans([c is not None and c <= size_class for c in classes]):
            if sum(classes[i] == size_class for i in run) >= files_min:
                runs.append(run)
                classes[run.start : run.stop] = [None] * len(run)
    return sorted(runs, key=lambda run: run.start)


def _size_class(size: int, full_bytes: int) -> int:
    size_class, limit = _CLASSES - 1, full_bytes / _CLASS_FACTOR
    while size < limit and size_class:
        size_class, limit = size_class - 1, limit / _CLASS_FACTOR
    return size_class


def _spans(flags: Sequence[bool]) -> Iterator[range]:
    """Yield the maximal ranges of positions that are set."""
    start = None
    for position, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = position
        elif not flag and start is not None:
            yield range(start, position)
            start = None


def neighbours(files: Iterable[LiveFile], slice_us: int | None) -> Iterator[list[LiveFile]]:
    """Yield the files of each bucket, partition and slice of time in offset order."""
    by_place: dict[tuple[int, PartitionValues, int], list[LiveFile]] = defaultdict(list)
    for file in files:
        if file.bucket is not None:
            by_place[(file.spec_id, file.partition, file.bucket)].append(file)
    for members in by_place.values():
        members.sort(key=lambda file: (file.start_offset, file.path))
        for _, slice_files in itertools.groupby(members, key=lambda file: file.slice_of(slice_us)):
            yield list(slice_files)


def _groups(files: Sequence[LiveFile], limits: RewriteLimits) -> Iterator[RewriteGroup]:
    runs = merge_runs(
        [None if file.is_fixed else file.live_bytes for file in files],
        full_bytes=limits.full_bytes,
        files_min=limits.files_min,
        is_eager=limits.is_eager,
    )
    packed = {position for run in runs for position in run}
    worn = [
        file.deleted_share >= limits.deleted_share_min
        and not file.is_fixed
        and position not in packed
        for position, file in enumerate(files)
    ]
    for run in [*runs, *_spans(worn)]:
        for piece in _pieces([files[position] for position in run], limits.target_bytes):
            # A rewrite of a single file only pays off for the deleted rows of the file.
            alone = piece.files[0]
            if len(piece.files) > 1 or alone.deleted_share >= limits.deleted_share_min:
                yield piece


def _pieces(files: Sequence[LiveFile], target_bytes: int) -> Iterator[RewriteGroup]:
    """Cut a run into pieces of about a file each."""
    pieces: list[list[LiveFile]] = [[]]
    live_bytes = 0
    for file in files:
        if live_bytes >= target_bytes:
            pieces.append([])
            live_bytes = 0
        pieces[-1].append(file)
        live_bytes += file.live_bytes
    if len(pieces) > 1 and live_bytes < target_bytes // 2:
        short_piece = pieces.pop()
        pieces[-1] += short_piece
    for piece in pieces:
        total = sum(file.live_bytes for file in piece)
        outputs = max(1, round(total / target_bytes))
        first = piece[0]
        assert first.bucket is not None
        yield RewriteGroup(
            spec_id=first.spec_id,
            partition=first.partition,
            bucket=first.bucket,
            files=tuple(piece),
            file_bytes=max(target_bytes, int(total / outputs * _SIZE_SLACK)),
        )


def _bytes_per_gain(group: RewriteGroup) -> float:
    """Return a group's bytes for each file, or file's worth of deletes, that the rewrite saves."""
    gain = len(group.files) - 1 + sum(file.deleted_share for file in group.files)
    return group.size_bytes / max(gain, 1e-3)


def _delete_merges(
    deletes: Iterable[LiveDeletes], staying: frozenset[str], limits: RewriteLimits
) -> Iterator[tuple[LiveDeletes, ...]]:
    by_partition: Mapping[tuple[int, PartitionValues], list[LiveDeletes]] = defaultdict(list)
    for delete in deletes:
        if delete.is_vector or not delete.is_mergeable:
            continue
        by_partition[(delete.spec_id, delete.partition)].append(delete)
    for members in by_partition.values():
        # Delete files have no order of their own: files of one size become neighbours.
        members.sort(key=lambda delete: (delete.size_bytes, delete.deletes.path))
        runs = merge_runs(
            [delete.size_bytes for delete in members],
            full_bytes=limits.target_bytes,
            files_min=limits.deletes_min,
            is_eager=limits.is_eager,
        )
        for run in runs:
            merged = [members[position] for position in run]
            paths = frozenset().union(*(delete.data_paths for delete in merged)) & staying
            # A few data files get one delete file each: merging gains nothing for so few.
            if len(merged) >= 2 * merged_deletes(len(paths)):
                yield tuple(merged)


def merged_deletes(path_count: int) -> int:
    """Return how many delete files remain after merging the deletes of `path_count` data files."""
    return path_count if path_count <= FILE_SCOPED_MAX else 1
