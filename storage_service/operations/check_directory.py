"""The check of a whole data directory, or a backup, without a running service. Reads only."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from streamhouse.core.errors import (
    InvalidRequestError,
    StreamhouseError,
    UnavailableError,
)
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.progress import NO_PROGRESS, Progress
from streamhouse.core.model.table import TableInfo
from streamhouse.storage_service.directory.data_directory import (
    GIVEN_UP_SUFFIX,
    DataDirectory,
    lock,
)
from streamhouse.storage_service.directory.format_upgrade import find_former_tables
from streamhouse.storage_service.directory.service_state import (
    ServiceState,
    load_service_state,
)
from streamhouse.storage_service.directory.state_file import StateFile
from streamhouse.storage_service.directory.table_files import load_lake_state, load_table
from streamhouse.storage_service.directory.table_folders import find_strangers
from streamhouse.storage_service.engine.upkeep.row_ages import RowAges
from streamhouse.storage_service.kafka.registry.schema_set import SchemaSet
from streamhouse.storage_service.operations._check_keys import check_rows_by_key
from streamhouse.storage_service.operations._check_log import check_log
from streamhouse.storage_service.operations._check_transactions import check_transactions
from streamhouse.storage_service.operations.findings import (
    BucketFacts,
    CheckReport,
    TableFacts,
)
from streamhouse.storage_service.ownership.journal.restore.journal_file import refuse_half_made

__all__ = ["LakeCheck", "check_directory", "locked_out"]


LakeCheck = Callable[[TableInfo, LakeState, TableFacts, CheckReport], None]
"""Compares a table with its lake, and adds findings: this room has no lake library."""


@contextlib.contextmanager
def locked_out(path: Path) -> Iterator[DataDirectory]:
    """Keep services from starting on `path`; raises `UnavailableError` if a service is running."""
    has_tables = (path / "tables").is_dir() and any((path / "tables").iterdir())
    if not (path / "service.json").is_file() and not has_tables:
        raise InvalidRequestError(f"{path} is no data directory: it has no service.json")
    if not (path / "LOCK").exists():
        # A backup, or a directory that was never served.
        yield DataDirectory(path)
        return
    descriptor = os.open(path / "LOCK", os.O_RDONLY | os.O_CLOEXEC)
    try:
        lock(descriptor, fcntl.LOCK_SH)
        yield DataDirectory(path)
    except BlockingIOError as error:
        raise UnavailableError(
            f"{path} is in use by a running service, and changes while it is read: stop it, or"
            " check a backup of it"
        ) from error
    finally:
        os.close(descriptor)


def check_directory(
    path: Path, *, lake_check: LakeCheck | None, progress: Progress = NO_PROGRESS
) -> CheckReport:
    """Check everything in `path`; progress counts bytes of logs.

    Raises `InvalidRequestError` for any other directory, or a directory still in the making from a
    standby's journal; `UnavailableError` for a directory in use.
    """
    with locked_out(path) as directory:
        # A standby's directory may be behind its journal in every file, without a loss.
        refuse_half_made(path)
        report = CheckReport(str(path))
        try:
            state, is_former = load_service_state(directory)
            if is_former:
                find_former_tables(directory, state)
            strangers = find_strangers(directory, state)
        except StreamhouseError as error:
            report.error("service.json", error.message)
            return report
        for stranger in strangers:
            report.error("tables", stranger)
        for remains in sorted(state.dropped | state.creating):
            if directory.table(remains).exists() or directory.dropped(remains).exists():
                report.warning(
                    f"tables/{remains}", "is no table any more; the next start clears it"
                )
        progress.expect(sum(file.stat().st_size for file in directory.tables.rglob("*.log")))
        for info in _tables(directory, state, report):
            facts = TableFacts(path=str(info.path), table_id=info.table_id)
            report.tables.append(facts)
            _check_table(directory, info, facts, report, lake_check, progress)
    return report


def _tables(
    directory: DataDirectory, state: ServiceState, report: CheckReport
) -> Iterator[TableInfo]:
    for path in sorted(directory.tables.glob(f"*{GIVEN_UP_SUFFIX}")):
        report.warning(str(path), "was given up, and is no table any more; nothing deletes it")
    for table_id, entry in sorted(state.tables.items()):
        try:
            info, _ = load_table(directory, table_id, entry)
        except StreamhouseError as error:
            report.error(f"table '{entry.path}'", error.message)
        else:
            yield info


def _check_table(
    directory: DataDirectory,
    info: TableInfo,
    facts: TableFacts,
    report: CheckReport,
    lake_check: LakeCheck | None,
    progress: Progress,
) -> None:
    where = f"table '{info.path}'"
    try:
        lake = load_lake_state(directory, info)
    except StreamhouseError as error:
        report.error(where, error.message)
        lake = LakeState(tiered_offsets=dict.fromkeys(range(info.bucket_count), 0))
    if lake.diverged:
        report.error(where, lake.diverged)
    for bucket in range(info.bucket_count):
        tiered = lake.tiered_offsets[bucket]
        bucket_facts = BucketFacts(bucket=bucket, tiered_offset=tiered)
        facts.buckets.append(bucket_facts)
        log = check_log(
            directory.bucket(info.table_id, bucket),
            info,
            bucket_facts,
            report,
            end_min=tiered,
            is_former=info.table_id in directory.former,
            progress=progress,
        )
        facts.logs[bucket] = log.fingerprints
        if info.is_primary_key_table:
            kv = directory.key_rows(info.table_id, bucket)
            ends = {tiered} if lake.batch is None else {tiered, lake.batch.tiered_offsets[bucket]}
            lake_offsets = check_rows_by_key(kv, log, info, bucket_facts, report, lake_ends=ends)
            facts.lake_offsets |= {(bucket, end): offsets for end, offsets in lake_offsets.items()}
        if bucket_facts.log_start_offset > tiered and info.properties().datalake_enabled:
            report.warning(
                f"{where}, bucket {bucket}",
                f"rows [{tiered}, {bucket_facts.log_start_offset}) are neither in the log nor in"
                " the lake; retention takes them while table.datalake.enabled is false",
            )
    schemas = directory.sidecar_file(info.table_id, "record_schemas")
    for file in (
        directory.lake_pins_file(info.table_id),
        directory.consumers_file(info.table_id),
        directory.sidecar_file(info.table_id, "live_places"),
        schemas,
    ):
        try:
            if file.exists():
                content = file.load()
                if file is schemas:
                    SchemaSet.stored(info.table_id, content, place=str(file.path))
        except StreamhouseError as error:
            report.error(where, error.message)
    if info.is_primary_key_table:
        _check_ages(directory.row_ages_file(info.table_id), facts, report)
    check_transactions(directory, info, lake, facts, report)
    if lake_check is not None and lake.snapshot_id is not None:
        lake_check(info, lake, facts, report)


def _check_ages(file: StateFile, facts: TableFacts, report: CheckReport) -> None:
    where = f"table '{facts.path}'"
    try:
        age_ends = RowAges(file).ends()
    except StreamhouseError as error:
        report.error(where, error.message)
        return
    for bucket_facts in facts.buckets:
        end = age_ends.get(bucket_facts.bucket, 0)
        if end > bucket_facts.log_end_offset:
            report.error(
                f"{where}, bucket {bucket_facts.bucket}",
                f"{file.path.name} has ages of changes up to offset {end}, but the log ends at"
                f" {bucket_facts.log_end_offset}: what is written there would be deleted as old;"
                " remove the file, and rows count from the next start on",
            )
