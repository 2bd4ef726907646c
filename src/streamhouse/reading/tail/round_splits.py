"""The tasks of a planned round, and the check of their results against the plan."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from streamhouse.core.errors import CorruptDataError
from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.core.model.table import TableInfo
from streamhouse.lake.commits.committer import IcebergLakeTable
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.files.parquet_writer import clustered_format
from streamhouse.reading.tail.lake_task import Retraction, SplitResult, TieringSplit
from streamhouse.reading.tail.round_planner import RoundPlan

__all__ = ["check_results", "round_splits"]

_logger = logging.getLogger(__name__)


def round_splits(
    plan: RoundPlan,
    table: TableInfo,
    lake_table: IcebergLakeTable,
    *,
    folder: str,
    files: LakeFilesystem,
    endpoint: str,
    token: str | None,
) -> list[TieringSplit]:
    """Return one task for each split of the plan; its files go into `folder`."""
    is_folded = table.is_primary_key_table and lake_table.role is not LakeRole.CHANGES
    retractions = _retractions(plan, lake_table) if is_folded else {}
    lake_schema = lake_table.file_schema.serialize().to_pybytes()
    clustering = lake_table.layout.clustering
    file_format = clustered_format(table.properties().datalake_target_file_bytes, clustering)
    return [
        TieringSplit(
            endpoint=endpoint,
            token=token,
            table=str(table.path),
            table_id=table.table_id,
            schema_id=table.schema_id,
            range=split,
            lake_schema=lake_schema,
            partitioning=lake_table.layout.partitioning,
            folder=folder,
            file_format=file_format,
            files=files,
            retraction=retractions.get(split.bucket),
            clustering=clustering,
        )
        for split in plan.splits
    ]


def _retractions(plan: RoundPlan, lake_table: IcebergLakeTable) -> dict[int, Retraction]:
    live = lake_table.live_files()
    return {
        bucket: Retraction(
            boundary=plan.base_offsets[bucket],
            bucket_end=plan.target_offsets[bucket],
            lake_files=live.of_bucket(bucket, before=plan.base_offsets[bucket]),
            is_version_3=lake_table.has_vectors,
        )
        for bucket in {split.bucket for split in plan.splits}
    }


def check_results(
    plan: RoundPlan, results: Sequence[SplitResult], *, table: str, is_folded: bool
) -> None:
    """Raise `CorruptDataError` unless every split was written, once and whole.

    `is_folded`: tasks write surviving rows only, and check the number themselves.
    """
    written = sorted((r.range.bucket, r.range.start, r.range.end) for r in results)
    planned = sorted((s.bucket, s.start, s.end) for s in plan.splits)
    rows = sum(file.row_count for result in results for file in result.files)
    if written != planned or not (is_folded or rows == plan.row_count):
        raise CorruptDataError(
            f"table '{table}': the tasks wrote {rows} rows in {len(written)} splits;"
            f" {plan.row_count} in {len(planned)} were planned"
        )
    not_found = sum(result.not_found for result in results)
    if not_found:
        _logger.warning(
            "event=retracted_rows_gone table=%s rows=%d why='they are in no live file of the lake"
            " table; another engine deleted them before, or they had gone when its batch layout was"
            " filled'",
            table,
            not_found,
        )
