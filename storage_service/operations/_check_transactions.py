"""The check of a table's transactions on disk: decisions, and the rows of staged parts."""

from __future__ import annotations

from collections.abc import Iterable

from streamhouse.core.errors import CorruptDataError
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.table import TableInfo
from streamhouse.storage_service.directory.data_directory import DECISION_SUFFIX, DataDirectory
from streamhouse.storage_service.engine.transactions.state_agreement import disagreements
from streamhouse.storage_service.engine.transactions.transaction_files import (
    OPEN_SUFFIX,
    PART_SUFFIX,
    Decision,
    TransactionFiles,
    next_decision_number,
)
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.staged_part import StagedPart
from streamhouse.storage_service.operations.findings import CheckReport, TableFacts

__all__ = ["check_transactions"]


def check_transactions(
    directory: DataDirectory,
    info: TableInfo,
    lake: LakeState,
    facts: TableFacts,
    report: CheckReport,
) -> None:
    """Check the files in the table's `transactions/` against the logs and the lake."""
    where = f"table '{info.path}', transactions"
    is_former = info.table_id in directory.former
    files = TransactionFiles(
        directory.transactions(info.table_id),
        service_id=directory.service_id,
        table_id=info.table_id,
        filesystem=LocalFilesystem(),
        is_former=is_former,
    )
    if is_former and not files.directory.is_dir():
        return
    names = LocalFilesystem().list_names(files.directory)
    folded: list[Decision] = []
    decisions: list[Decision] = []
    truncated: dict[int, int] = {}
    findings_before = len(report.findings)
    try:
        folded = files.load_folded() if not is_former or "outcomes" in names else []
        truncated, _ = files.load_truncated()
    except CorruptDataError as error:
        report.error(where, error.message)
    for name in names:
        if name.endswith(DECISION_SUFFIX):
            try:
                decisions.append(files.load_decision(name))
            except CorruptDataError as error:
                report.error(where, error.message)
    if len(report.findings) == findings_before:
        for decision in decisions:
            for bucket, offset in decision.truncated_offsets.items():
                truncated[bucket] = max(truncated.get(bucket, 0), offset)
        _check_agreement(info, lake, facts, report, [*folded, *decisions], truncated)
        try:
            if not is_former:
                next_decision_number(decisions, folded=files.folded, where=files.directory)
        except CorruptDataError as error:
            report.error(where, error.message)
    _check_open(files, names, where, report)
    _check_parts(files, names, {d.spec.transaction_id for d in decisions}, where, report)


def _check_agreement(
    info: TableInfo,
    lake: LakeState,
    facts: TableFacts,
    report: CheckReport,
    decisions: Iterable[Decision],
    truncated: dict[int, int],
) -> None:
    written_us = {bucket.bucket: bucket.transaction_us for bucket in facts.buckets}
    for problem in disagreements(
        lake,
        truncated_offsets=truncated,
        decisions=decisions,
        transactions_us=written_us,
        log_starts={bucket.bucket: bucket.log_start_offset for bucket in facts.buckets},
        forgotten_offsets={bucket.bucket: bucket.forgotten_offset for bucket in facts.buckets},
    ):
        report.error(f"table '{info.path}'", problem)


def _check_open(
    files: TransactionFiles, names: Iterable[str], where: str, report: CheckReport
) -> None:
    parts = {name.partition(".")[0] for name in names if name.endswith(PART_SUFFIX)}
    for name in names:
        if name.endswith(OPEN_SUFFIX):
            try:
                files.load_open(name)
            except CorruptDataError as error:
                if name.removesuffix(OPEN_SUFFIX) in parts:
                    report.error(where, f"{error.message}; its transaction cannot be committed")
                else:
                    report.warning(where, f"{error.message}; nothing is staged for it")


def _check_parts(
    files: TransactionFiles,
    names: Iterable[str],
    decided: set[str],
    where: str,
    report: CheckReport,
) -> None:
    transaction_ids = {name.partition(".")[0] for name in names if not name.endswith(PART_SUFFIX)}
    for name in names:
        if not name.endswith(PART_SUFFIX):
            continue
        transaction_id = name.partition(".")[0]
        if transaction_id not in transaction_ids:
            report.warning(
                where, f"{name} belongs to no transaction: that was dropped, or lost its file"
            )
        try:
            part = StagedPart.open(
                files.directory / name, filesystem=LocalFilesystem(), table_id=files.table_id
            )
            for _ in part.batches():
                pass
        except CorruptDataError as error:
            if transaction_id in decided:
                report.error(where, error.message)
            else:
                report.warning(
                    where,
                    f"{error.message}; if it was cut off it was never acknowledged, and the"
                    " next start drops it",
                )
