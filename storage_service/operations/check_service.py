"""The check of a whole service: is every shard's journal whole, and does the shard directory match?

Reads only, also while the shards serve: the shard directory is read before and after the journals,
and a table with a match in either reading is no finding.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from streamhouse.core.errors import CorruptDataError, InvalidNameError
from streamhouse.core.model.progress import NO_PROGRESS, Progress
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.directory.service_state import ServiceState
from streamhouse.storage_service.directory.state_file import StateIdentity, unseal
from streamhouse.storage_service.operations._check_names import DirectoryFacts, read_directory
from streamhouse.storage_service.operations.check_journal import (
    JournalReport,
    check_journal,
    read_file,
)
from streamhouse.storage_service.operations.findings import Finding, Severity
from streamhouse.storage_service.ownership.journal.names import SHARDS, ShardNames
from streamhouse.storage_service.ownership.journal.store.object_store import ObjectStore
from streamhouse.storage_service.ownership.shards.directory import BLOCK_IDS
from streamhouse.storage_service.ownership.shards.entries import NameEntry, NameState

__all__ = ["ServiceReport", "check_service"]

_SERVICE_FILE = "service.json"


@dataclass(slots=True, kw_only=True)
class ServiceReport:
    """The result of a service's check: findings of the shard directory, reports of journals."""

    url: str
    shards: list[JournalReport] = field(default_factory=list)
    names: int = 0
    findings: list[Finding] = field(default_factory=list)
    """Findings of the shard directory alone."""

    @property
    def is_sound(self) -> bool:
        """Whether the service can be restored, with each table in one shard."""
        errors = [f for f in self.findings if f.severity is Severity.ERROR]
        return not errors and all(shard.is_sound for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "url": self.url,
            "is_sound": self.is_sound,
            "names": self.names,
            "findings": [finding.to_json() for finding in self.findings],
            "shards": [shard.to_json() for shard in self.shards],
        }


def check_service(store: ObjectStore, *, progress: Progress = NO_PROGRESS) -> ServiceReport:
    """Check the shard directory and every shard; progress counts bytes of packs.

    Raises the store's errors, and `UnavailableError` or `StorageFailedError` for failed requests.
    """
    report = ServiceReport(url=store.url)
    directory_before = read_directory(store)
    for shard in sorted(directory_before.shards | set(_journals(store))):
        journal = check_journal(store, ShardNames(shard), progress=progress)
        if journal.epochs or shard not in directory_before.shards:
            report.shards.append(journal)
        else:
            _note_without_journal(shard, directory_before, report)
    states = {
        journal.shard: state
        for journal in report.shards
        if (state := _state(store, journal, directory_before.service_id)) is not None
    }
    directory_after = read_directory(store)
    report.names = len(directory_after.entries)
    report.findings += directory_after.findings
    _compare(states, directory_before, directory_after, report)
    if not report.shards:
        _error(report, SHARDS, "there is no journal of any shard")
    return report


def _journals(store: ObjectStore) -> Iterator[str]:
    """Yield the shards with an object in the store, by one listing a shard."""
    start_after_key = ""
    while keys := store.list_objects(SHARDS, start_after=start_after_key, count_max=1):
        shard = keys[0].key.removeprefix(SHARDS).partition("/")[0]
        with contextlib.suppress(InvalidNameError):
            yield ShardNames(shard).shard
        # "0" is the first character after "/": no key of this shard is beyond it.
        start_after_key = f"{SHARDS}{shard}0"


def _state(store: ObjectStore, journal: JournalReport, service_id: str) -> ServiceState | None:
    """Return a shard's state at the end of the journal; None if unknown."""
    names = ShardNames(journal.shard)
    file = None if journal.tree is None else journal.tree.get(_SERVICE_FILE)
    if file is None:
        if journal.tree is not None:
            # The shard's first start makes the file, after the journal.
            return ServiceState()
        return None
    where = f"{_SERVICE_FILE} of shard '{journal.shard}'"
    identity = StateIdentity(kind="service", service_id=service_id)
    try:
        content = unseal(read_file(store, names, file), identity, where=where)
        return ServiceState.from_json(content, where=where)
    except CorruptDataError as error:
        journal.error(where, error.message)
        return None


def _note_without_journal(shard: str, facts: DirectoryFacts, report: ServiceReport) -> None:
    paths = [path for path, e in facts.entries.items() if e.shard == shard and e.table_id]
    if paths:
        _error(
            report,
            ShardNames(shard).journal,
            f"shard '{shard}' has no journal, but the directory says it has {_some_paths(paths)}",
        )
    else:
        report.findings.append(
            Finding(
                Severity.WARNING,
                ShardNames(shard).journal,
                f"shard '{shard}' has no journal and no table: nobody ever served it",
            )
        )


def _compare(
    states: dict[str, ServiceState],
    directory_before: DirectoryFacts,
    directory_after: DirectoryFacts,
    report: ServiceReport,
) -> None:
    """Check the shard directory's names against the shards' tables, in both directions.

    A moving table is in two shards, and the shard directory may name either: a start
    completes the move.
    """
    tables = {
        shard: {entry.path: n for n, entry in state.tables.items() if n not in state.leaving}
        for shard, state in states.items()
    }
    moving = {
        shard: {
            *(ticket.path for ticket in state.leaving.values()),
            *(arrival.ticket.path for arrival in state.arriving.values() if arrival.is_ready),
        }
        for shard, state in states.items()
    }
    for shard, shard_tables in sorted(tables.items()):
        for path, table_id in sorted(shard_tables.items()):
            if path in directory_after.unknown:
                continue
            entries = [facts.entries.get(path) for facts in (directory_before, directory_after)]
            if not any(_is_of(entry, shard, table_id) for entry in entries):
                _error(
                    report,
                    f"table '{path}'",
                    f"shard '{shard}' has it under id {table_id}, but the directory says"
                    f" {_entry_text(directory_after.entries.get(path))}",
                )
    for path, entry in sorted(directory_after.entries.items()):
        holder_tables = tables.get(entry.shard)
        if entry.state is not NameState.HELD or holder_tables is None:
            continue
        if path in holder_tables or path in moving[entry.shard]:
            continue
        if entry == directory_before.entries.get(path):
            report.findings.append(
                Finding(
                    Severity.WARNING,
                    f"table '{path}'",
                    f"shard '{entry.shard}' holds the name for no table: its next start frees it",
                )
            )
    _check_ids(tables, directory_after, report)


def _check_ids(
    tables: dict[str, dict[TablePath, int]], facts: DirectoryFacts, report: ServiceReport
) -> None:
    """Check every table id: claimed by a shard, and used by one table only."""
    paths: dict[int, set[TablePath]] = collections.defaultdict(set)
    for path, entry in facts.entries.items():
        if entry.table_id:
            paths[entry.table_id].add(path)
    for shard_tables in tables.values():
        for path, table_id in shard_tables.items():
            paths[table_id].add(path)
    for table_id, same in sorted(paths.items()):
        if len(same) > 1:
            _error(
                report, f"table id {table_id}", f"it is of {len(same)} tables: {_some_paths(same)}"
            )
        is_claimed = table_id // BLOCK_IDS in facts.blocks
        if facts.service_id and table_id >= facts.first_id and not is_claimed:
            _error(
                report,
                f"table id {table_id}",
                f"{_some_paths(same)} has it, but no shard ever claimed ids from"
                f" {table_id // BLOCK_IDS * BLOCK_IDS} on: another shard may claim and reuse it",
            )


def _is_of(entry: NameEntry | None, shard: str, table_id: int) -> bool:
    """Return whether the shard directory's entry allows that a shard has a table."""
    if entry is None or entry.table_id != table_id:
        return False
    # A table on its way to another shard may be in either shard.
    return entry.state is not NameState.HELD or entry.shard == shard


def _entry_text(entry: NameEntry | None) -> str:
    if entry is None:
        return "that there is no such table"
    if not entry.table_id:
        return f"that shard '{entry.shard}' is to make it"
    return f"that shard '{entry.shard}' has it under id {entry.table_id}"


def _some_paths(paths: list[TablePath] | set[TablePath]) -> str:
    shown = [f"'{path}'" for path in sorted(paths)[:3]]
    return ", ".join(shown) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _error(report: ServiceReport, where: str, problem: str) -> None:
    report.findings.append(Finding(Severity.ERROR, where, problem))
