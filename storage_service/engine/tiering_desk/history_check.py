"""Whether a lake table has the history of this service's log: the one judge of that.

Only durable rows are tiered. So in a right history no lake ends behind the log's end, and the log's
fingerprint at a tiered offset is the one that the snapshot carries. Where either fails, an old copy
or a twin of this data directory has tiered, or this directory is the copy.

Reads frame headers: not for the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from streamhouse.core.errors import HistoryDivergedError
from streamhouse.core.model.lake.coverage import BucketDivergence, CoveredOffsets
from streamhouse.core.model.lake.facts import LakeState, SideLakeState
from streamhouse.storage_service.engine.open_table import OpenTable

__all__ = ["check_history", "covered_by", "divergence_of", "fingerprints_at", "is_proven"]


def check_history(table: OpenTable, lakes: Iterable[CoveredOffsets]) -> None:
    """Raise `HistoryDivergedError` unless each of the lakes may have the rows of the table's log.

    What an earlier release tiered has no fingerprints, and is judged by its offsets alone.
    """
    for covered in lakes:
        if problem := _problem(table, covered):
            raise HistoryDivergedError(
                f"table '{table.path}'{problem}. An old copy or a twin of this data directory has"
                " tiered, or is this one: nothing is written or tiered until one of the two"
                f" histories is chosen (streamhouse adopt {table.path}; docs/operations.md, 'Two"
                " histories')"
            )


def fingerprints_at(table: OpenTable, offsets: Mapping[int, int]) -> dict[int, str]:
    """Return bucket -> the log's fingerprint at its offset, of the buckets where one is known."""
    fingerprints = {}
    for bucket, offset in offsets.items():
        fingerprint = table.tablet(bucket).fingerprint(offset)
        if fingerprint is not None:
            fingerprints[bucket] = fingerprint.hex()
    return fingerprints


def covered_by(lake: LakeState | SideLakeState) -> CoveredOffsets:
    """Return what a registered snapshot covers, of no epoch."""
    return CoveredOffsets(
        tiered_offsets=lake.tiered_offsets, fingerprints=lake.fingerprints, epoch=0
    )


def divergence_of(
    table: OpenTable, histories: Sequence[CoveredOffsets], covered: CoveredOffsets
) -> tuple[BucketDivergence, ...]:
    """Return bucket by bucket how far log and lake have the same rows, and what each has.

    `histories` are what the snapshots of this table say, `covered` the current one of the lake.
    """
    divergences = []
    for bucket, tablet in enumerate(table.tablets):
        log_end, lake_end = tablet.log_end_offset, covered.tiered_offsets.get(bucket, 0)
        # What was registered came from this log: the lake only goes forward.
        common = min(table.lake.tiered_offsets.get(bucket, 0), log_end, lake_end)
        for snapshot in histories:
            end = snapshot.tiered_offsets.get(bucket, 0)
            log_fingerprint = tablet.fingerprint(end) if end > common else None
            if log_fingerprint is not None and log_fingerprint.hex() == snapshot.fingerprints.get(
                bucket
            ):
                common = end
        divergences.append(
            BucketDivergence(
                bucket=bucket,
                common_offset=common,
                log_start_offset=tablet.log_start_offset,
                log_end_offset=log_end,
                lake_end_offset=lake_end,
            )
        )
    return tuple(divergences)


def is_proven(table: OpenTable, covered: CoveredOffsets) -> bool:
    """Whether fingerprints show, in every bucket, that the lake has the rows of the log."""
    return all(
        end == 0
        or fingerprints_at(table, {bucket: end}).get(bucket, "") == covered.fingerprints.get(bucket)
        for bucket, end in covered.tiered_offsets.items()
    )


def _problem(table: OpenTable, covered: CoveredOffsets) -> str:
    unproven = []
    for bucket, end in sorted(covered.tiered_offsets.items()):
        tablet = table.tablet(bucket)
        log_end = tablet.log_end_offset
        if end > log_end:
            return (
                f", bucket {bucket}: the lake has rows up to offset {end:,}, but this log ends at"
                f" {log_end:,}"
            )
        stated = covered.fingerprints.get(bucket)
        log_fingerprint = None if stated is None else tablet.fingerprint(end)
        if log_fingerprint is None:
            if end > table.lake.tiered_offsets.get(bucket, 0):
                unproven.append(bucket)
        elif log_fingerprint.hex() != stated:
            return f", bucket {bucket}: the lake has other rows below offset {end:,} than this log"
    if unproven and covered.epoch > table.lake.tiering_epoch:
        # An epoch is durable here before a worker gets it.
        return (
            f", bucket {unproven[0]}: the lake has rows of tiering epoch {covered.epoch}, and this"
            f" service has given out epochs up to {table.lake.tiering_epoch} only"
        )
    return ""
