"""Where a round starts: the offsets of a lake table, checked against the service's record."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from streamhouse.core.errors import CorruptDataError, FencedError
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.facts import LakeState, SideLakeState
from streamhouse.lake.commits.committer import IcebergLakeTable

__all__ = ["base_offsets"]


def base_offsets(
    lake_table: IcebergLakeTable,
    registered: LakeState | SideLakeState | None,
    *,
    epoch: int,
    bucket_count: int,
    compare: Callable[[CoveredOffsets], object],
) -> Mapping[int, int]:
    """Return the offsets that the lake table covers, never below the `registered` offsets.

    If the lake table differs from `registered`, `compare` asks the service to verify its history.

    Raises:
        HistoryDivergedError: the lake table has other rows than the log.
        FencedError: a worker with a later epoch than `epoch` advanced the lake table.
        CorruptDataError: the lake table was rolled back, or another engine changed rows that
            belong to Streamhouse.
    """
    nothing = dict.fromkeys(range(bucket_count), 0)
    recorded = nothing if registered is None else registered.tiered_offsets
    covered = lake_table.covered
    if covered is None:
        if registered is None or registered.snapshot_id is None:
            return recorded
        raise CorruptDataError(
            f"lake table '{lake_table.name}' no longer has the rows tiered to it: its snapshots of"
            f" tiering were rolled back; set its current snapshot to {registered.snapshot_id} or a"
            " later one"
        )
    fingerprints = {} if registered is None else registered.fingerprints
    if (
        covered.epoch > epoch
        or dict(covered.tiered_offsets) != dict(recorded)
        or any(fingerprints.get(b, value) != value for b, value in covered.fingerprints.items())
    ):
        compare(covered)
    if covered.epoch > epoch:
        raise FencedError(
            f"lake table '{lake_table.name}' was advanced by tiering epoch {covered.epoch}; this"
            f" worker has epoch {epoch}"
        )
    behind = [b for b, end in recorded.items() if covered.tiered_offsets.get(b, 0) < end]
    if behind:
        snapshot_id = None if registered is None else registered.snapshot_id
        raise CorruptDataError(
            f"lake table '{lake_table.name}', bucket {behind[0]}: it covers offsets up to"
            f" {covered.tiered_offsets.get(behind[0], 0)}, but {recorded[behind[0]]} were"
            f" tiered; it was rolled back: set its current snapshot to {snapshot_id}"
            " or a later one"
        )
    lake_table.check_outside()
    return covered.tiered_offsets
