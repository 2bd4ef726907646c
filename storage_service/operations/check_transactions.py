"""Checking what a table's transactions have on disk: decisions, and the rows of staged parts."""

from __future__ import annotations

import json
from pathlib import Path

from streamhouse.storage_service.errors import CorruptDataError
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.staged_part import StagedPart
from streamhouse.storage_service.model.table import TableInfo
from streamhouse.storage_service.operations.findings import CheckReport
from streamhouse.storage_service.tablet.transaction_files import (
    DECISION_SUFFIX,
    OUTCOMES_FILE,
    PART_SUFFIX,
    Decision,
)

__all__ = ["check_transactions"]


def check_transactions(directory: Path, info: TableInfo, report: CheckReport) -> None:
    """Check the files in `directory`, which need not exist."""
    where = f"table '{info.path}', transactions"
    paths = sorted(directory.iterdir()) if directory.is_dir() else []
    decided: set[str] = set()
    for path in paths:
        if path.name != OUTCOMES_FILE and path.suffix != DECISION_SUFFIX:
            continue
        try:
            value = json.loads(path.read_bytes())
            for entry in value["decisions"] if path.name == OUTCOMES_FILE else [value]:
                decided.add(Decision.from_json(entry).spec.transaction_id)
        except (OSError, ValueError, KeyError, TypeError) as error:
            report.error(where, f"{path.name} is unreadable: {error!r}")
    for path in paths:
        if path.suffix != PART_SUFFIX:
            continue
        try:
            part = StagedPart.open(path, filesystem=LocalFilesystem(), table_id=info.table_id)
            for _ in part.batches():
                pass
        except CorruptDataError as error:
            if path.name.partition(".")[0] in decided:
                report.error(where, error.message)
            else:
                report.warning(
                    where, f"{error.message}; if it was cut off it was never acknowledged, and the"
                    " next start drops it"
                )  # fmt: skip
