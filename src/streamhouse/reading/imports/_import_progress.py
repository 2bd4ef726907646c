"""The steps of an import, and its progress, which is kept in the versions of transactions.

The version of a step is the sequence number of its source snapshot, followed by the number of
imported files of the snapshot; all bits are set when all files are imported. Sequence numbers grow
with every snapshot, so versions grow with every step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from streamhouse.core.errors import UnsupportedError
from streamhouse.reading.files.append_position import AppendPosition
from streamhouse.reading.imports._import_origin import ImportOrigin

if TYPE_CHECKING:
    from streamhouse.reading.files.appends import SourceTable

__all__ = ["STEP_ROWS", "ImportStep", "last_position", "steps", "version_of"]

STEP_ROWS: Final = 4_000_000
"""A step ends with the file that reaches this. Never change it: an import that is under way would
be cut elsewhere."""

_FILE_BITS: Final = 24
_ALL_FILES: Final = (1 << _FILE_BITS) - 1
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportStep:
    """The files of one snapshot between two positions; without rows where it added none."""

    start: AppendPosition
    end: AppendPosition
    row_count: int


def steps(
    source: SourceTable,
    position: AppendPosition,
    *,
    until: int | None,
    skipped: Collection[str] = (),
) -> Iterator[ImportStep]:
    """Yield the steps from a position (a start, or the end of a step) to the snapshot `until`."""
    for start, counts in source.unread(position, until=until, skipped=skipped):
        if not counts:
            # Said all the same: so the snapshot may expire.
            yield ImportStep(start=start, end=start, row_count=0)
        first, rows = start, 0
        for files_read, count in enumerate(counts, start=start.files_read + 1):
            rows += count
            if rows >= STEP_ROWS or files_read == start.file_count:
                end = start.at(files_read)
                yield ImportStep(start=first, end=end, row_count=rows)
                first, rows = end, 0


def version_of(position: AppendPosition) -> int:
    """Return the version of the step that ends at a position."""
    if position.file_count >= _ALL_FILES:
        raise UnsupportedError(
            f"snapshot {position.snapshot_id} of the Iceberg table has {position.file_count} files,"
            f" of which an import takes less than {_ALL_FILES}; compact the table"
        )
    files = _ALL_FILES if position.is_done else position.files_read
    return (position.sequence << _FILE_BITS) | files


def last_position(
    source: SourceTable,
    origin: ImportOrigin,
    is_committed: Callable[[int], bool],
    *,
    skipped: Collection[str] = (),
) -> AppendPosition:
    """Return the position of the import, from the versions committed so far.

    Raises `SnapshotNotFoundError` if the next snapshot of the import was expired.
    """
    ids = source.ancestors()[::-1]
    begun = _last_true(ids, lambda at: is_committed((source.sequence(at) << _FILE_BITS) | 1))
    if begun is None:
        return _before_all(source, origin, ids, is_committed)
    start = AppendPosition(
        table_uuid=source.uuid,
        snapshot_id=begun,
        sequence=source.sequence(begun),
        is_initial=begun == origin.snapshot_id,
    )
    if is_committed(version_of(start)):
        return start
    start = source.start(begun) if start.is_initial else source.appended(begun, skipped=skipped)
    ends = [step.end for step in steps(source, start, until=begun, skipped=skipped)]
    return _last_true(ends, lambda end: is_committed(version_of(end))) or start


def _before_all(
    source: SourceTable,
    origin: ImportOrigin,
    ids: Sequence[int],
    is_committed: Callable[[int], bool],
) -> AppendPosition:
    """Return the position of an import without any of the snapshots `ids`."""
    if ids:
        # The last one imported may be gone; then it is the one before the oldest.
        position = AppendPosition(
            table_uuid=source.uuid,
            snapshot_id=source.parent(ids[0]),
            sequence=source.sequence(ids[0]) - 1,
            is_initial=False,
        )
        if position.sequence > 0 and is_committed(version_of(position)):
            return position
    if origin.snapshot_id is not None:
        return source.start(origin.snapshot_id)
    return AppendPosition(
        table_uuid=source.uuid, snapshot_id=None, sequence=origin.sequence, is_initial=True
    )


def _last_true(items: Sequence[_T], test: Callable[[_T], bool]) -> _T | None:
    """Return the last item with a true `test`; the true items come first."""
    low, high = 0, len(items)
    while low < high:
        middle = (low + high) // 2
        if test(items[middle]):
            low = middle + 1
        else:
            high = middle
    return items[low - 1] if low else None
