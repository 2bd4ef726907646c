"""Where a round starts: the offsets that a lake table covers, checked against what is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from streamhouse.core.errors import CorruptDataError, FencedError
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.facts import LakeState, SideLakeState
from streamhouse.lake.commits.committer import IcebergLakeTable

__all__ = ["base_offsets"]


def base_offsets(
    lake_table: IcebergLakeTable,
    known: LakeState | SideLakeState | None,
    *,
    epoch: int,
    bucket_count: int,
    compare: Callable[[CoveredOffsets], object],
) -> Mapping[int, int]:
    """Return the offsets the lake table covers; it is never behind what the service knows.

    Where that is not what the service has registered, `compare` asks it whether it may be so.

    Raises:
        HistoryDivergedError: the lake table has other rows than the log.
        FencedError: a worker with a later epoch than `epoch` advanced it.
        CorruptDataError: it was rolled back, or another engine changed rows that it may not change.
    """
    nothing = dict.fromkeys(range(bucket_count), 0)
    recorded = nothing if known is None else known.tiered_offsets
    covered = lake_table.covered
    if covered is None:
        if known is None or known.snapshot_id is None:
            return recorded
        raise CorruptDataError(
            f"lake table '{lake_table.name}' no longer has the rows tiered to it: its snapshots of"
            f" tiering were rolled back; set its current snapshot to {known.snapshot_id} or a"
            " later one"
        )
    said = {} if known is None else known.fingerprints
    if (
        covered.epoch > epoch
        or dict(covered.tiered_offsets) != dict(recorded)
        or any(said.get(bucket, own) != own for bucket, own in covered.fingerprints.items())
    ):
        compare(covered)
    if covered.epoch > epoch:
        raise FencedError(
            f"lake table '{lake_table.name}' was advanced by tiering epoch {covered.epoch}; this"
            f" worker has epoch {epoch}"
        )
    behind = [b for b, end in recorded.items() if covered.tiered_offsets.get(b, 0) < end]
    if behind:
        snapshot_id = None if known is None else known.snapshot_id
        raise CorruptDataError(
            f"lake table '{lake_table.name}', bucket {behind[0]}: it covers offsets up to"
            f" {covered.tiered_offsets.get(behind[0], 0)}, but {recorded[behind[0]]} were"
            f" tiered; it was rolled back: set its current snapshot to {snapshot_id}"
            " or a later one"
        )
    lake_table.check_outside()
    return covered.tiered_offsets
