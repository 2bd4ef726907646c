"""Are all shards of a service whole, and does the directory say of them what they say themselves?

Reads only, and may be run while they serve: the directory is read before the journals and once more
after them, and what is true of one of both moments is no finding.
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
    """What a check of a whole service found: in its directory, and in the journal of each shard."""

    url: str
    shards: list[JournalReport] = field(default_factory=list)
    names: int = 0
    findings: list[Finding] = field(default_factory=list)
    """Of the directory alone."""

    @property
    def is_sound(self) -> bool:
        """Whether the service can be made again, with each table in one shard."""
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
    """Check the directory and every shard; progress counts bytes of packs.

    Raises what the store raises, and `UnavailableError` or `StorageFailedError` for the same.
    """
    report = ServiceReport(url=store.url)
    before = read_directory(store)
    for shard in sorted(before.shards | set(_journals(store))):
        journal = check_journal(store, ShardNames(shard), progress=progress)
        if journal.epochs or shard not in before.shards:
            report.shards.append(journal)
        else:
            _note_without_journal(shard, before, report)
    states = {
        journal.shard: found
        for journal in report.shards
        if (found := _state(store, journal, before.service_id)) is not None
    }
    after = read_directory(store)
    report.names = len(after.entries)
    report.findings += after.findings
    _compare(states, before, after, report)
    if not report.shards:
        _error(report, SHARDS, "there is no journal of any shard")
    return report


def _journals(store: ObjectStore) -> Iterator[str]:
    """Go through the shards that have anything in the store, by one listing a shard."""
    last = ""
    while found := store.list_objects(SHARDS, start_after=last, count_max=1):
        shard = found[0].key.removeprefix(SHARDS).partition("/")[0]
        with contextlib.suppress(InvalidNameError):
            yield ShardNames(shard).shard
        # The first character after "/": no key of this shard is beyond it.
        last = f"{SHARDS}{shard}0"


def _state(store: ObjectStore, journal: JournalReport, service_id: str) -> ServiceState | None:
    """Return what a shard has at the end of its journal; None if that is not known."""
    names = ShardNames(journal.shard)
    file = None if journal.tree is None else journal.tree.get(_SERVICE_FILE)
    if file is None:
        if journal.tree is not None:
            # It is made at the shard's first start, after the journal.
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
    held = [path for path, e in facts.entries.items() if e.shard == shard and e.table_id]
    if held:
        _error(
            report,
            ShardNames(shard).journal,
            f"shard '{shard}' has no journal, but the directory says it has {_some(held)}",
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
    before: DirectoryFacts,
    after: DirectoryFacts,
    report: ServiceReport,
) -> None:
    """See that each table has its name in the directory, and each name its table.

    One that moves is in two shards, and either may be named: a start of theirs completes that.
    """
    tables = {
        shard: {known.path: n for n, known in state.tables.items() if n not in state.leaving}
        for shard, state in states.items()
    }
    moving = {
        shard: {
            *(ticket.path for ticket in state.leaving.values()),
            *(arrival.ticket.path for arrival in state.arriving.values() if arrival.is_ready),
        }
        for shard, state in states.items()
    }
    for shard, own in sorted(tables.items()):
        for path, table_id in sorted(own.items()):
            if path in after.unknown:
                continue
            said = [facts.entries.get(path) for facts in (before, after)]
            if not any(_is_of(entry, shard, table_id) for entry in said):
                _error(
                    report,
                    f"table '{path}'",
                    f"shard '{shard}' has it under id {table_id}, but the directory says"
                    f" {_words(after.entries.get(path))}",
                )
    for path, entry in sorted(after.entries.items()):
        held_by = tables.get(entry.shard)
        if entry.state is not NameState.HELD or held_by is None:
            continue
        if path in held_by or path in moving[entry.shard]:
            continue
        if entry == before.entries.get(path):
            report.findings.append(
                Finding(
                    Severity.WARNING,
                    f"table '{path}'",
                    f"shard '{entry.shard}' holds the name for no table: its next start frees it",
                )
            )
    _check_ids(tables, after, report)


def _check_ids(
    tables: dict[str, dict[TablePath, int]], facts: DirectoryFacts, report: ServiceReport
) -> None:
    """See that no id is of two tables, and each was claimed."""
    paths: dict[int, set[TablePath]] = collections.defaultdict(set)
    for path, entry in facts.entries.items():
        if entry.table_id:
            paths[entry.table_id].add(path)
    for own in tables.values():
        for path, table_id in own.items():
            paths[table_id].add(path)
    for table_id, same in sorted(paths.items()):
        if len(same) > 1:
            _error(report, f"table id {table_id}", f"it is of {len(same)} tables: {_some(same)}")
        is_claimed = table_id // BLOCK_IDS in facts.blocks
        if facts.service_id and table_id >= facts.first_id and not is_claimed:
            _error(
                report,
                f"table id {table_id}",
                f"{_some(same)} has it, but no shard ever claimed ids from"
                f" {table_id // BLOCK_IDS * BLOCK_IDS} on: another may, and give it again",
            )


def _is_of(entry: NameEntry | None, shard: str, table_id: int) -> bool:
    """Whether the directory's words allow that a shard has a table."""
    if entry is None or entry.table_id != table_id:
        return False
    # A table that is on its way to another shard is in either.
    return entry.state is not NameState.HELD or entry.shard == shard


def _words(entry: NameEntry | None) -> str:
    if entry is None:
        return "that there is no such table"
    if not entry.table_id:
        return f"that shard '{entry.shard}' is to make it"
    return f"that shard '{entry.shard}' has it under id {entry.table_id}"


def _some(paths: list[TablePath] | set[TablePath]) -> str:
    shown = [f"'{path}'" for path in sorted(paths)[:3]]
    return ", ".join(shown) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _error(report: ServiceReport, where: str, problem: str) -> None:
    report.findings.append(Finding(Severity.ERROR, where, problem))
