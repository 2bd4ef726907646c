"""The shard directory in the store, with every fault in it.

A shard refuses to go on with damage; this module reads on, and each faulty object is a finding.
Reads only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from streamhouse.core.errors import CorruptDataError, StreamhouseError
from streamhouse.core.model.table import TablePath
from streamhouse.core.threads import Pool
from streamhouse.storage_service.operations.findings import Finding, Severity
from streamhouse.storage_service.ownership.journal.names import DIRECTORY
from streamhouse.storage_service.ownership.journal.store.object_store import ObjectStore
from streamhouse.storage_service.ownership.shards.chain import DirectoryObjects
from streamhouse.storage_service.ownership.shards.directory import BLOCK_IDS
from streamhouse.storage_service.ownership.shards.entries import (
    Folder,
    NameEntry,
    NameState,
    check_shard_name,
    unseal,
)

__all__ = ["DirectoryFacts", "read_directory"]

_THREADS: Final = 6
_DIGITS: Final = 8


@dataclass(slots=True)
class DirectoryFacts:
    """The contents of the shard directory. `entries` has the names that are not free."""

    service_id: str = ""
    first_id: int = 0
    """Lower ids belong to the first shard; each higher id is in a block of `blocks`."""
    entries: dict[TablePath, NameEntry] = field(default_factory=dict)
    unknown: set[TablePath] = field(default_factory=set)
    """Names with an unreadable newest version."""
    blocks: set[int] = field(default_factory=set)
    shards: set[str] = field(default_factory=set)
    """Every shard that any object names."""
    findings: list[Finding] = field(default_factory=list)

    def error(self, key: str, problem: str) -> None:
        """Note a fault that hides a table, or may give a name or id twice."""
        self.findings.append(Finding(Severity.ERROR, DIRECTORY + key, problem))

    def warning(self, key: str, problem: str) -> None:
        """Note a harmless fault."""
        self.findings.append(Finding(Severity.WARNING, DIRECTORY + key, problem))


def read_directory(objects: ObjectStore) -> DirectoryFacts:
    """Read the whole shard directory. Raises a `StreamhouseError` if the store does not answer."""
    facts, store = DirectoryFacts(), DirectoryObjects(objects)
    _read_service(store, facts)
    _read_blocks(store, facts)
    _read_shards(store, facts)
    for folder in (Folder.DATABASES, Folder.TABLES):
        _read_names(store, folder, facts)
    facts.shards |= {entry.shard for entry in facts.entries.values()}
    return facts


def _read_service(store: DirectoryObjects, facts: DirectoryFacts) -> None:
    content = _contents(store, [Folder.SERVICE], facts).get(Folder.SERVICE)
    if content is None:
        if not facts.findings:
            facts.error(Folder.SERVICE, "it is missing: the id of the service is unknown")
        return
    try:
        facts.service_id = str(content["service_id"])
        facts.first_id = int(content["first_block"]) * BLOCK_IDS
    except (KeyError, TypeError, ValueError) as error:
        facts.error(Folder.SERVICE, f"it names no service: {error!r}")


def _read_blocks(store: DirectoryObjects, facts: DirectoryFacts) -> None:
    keys = list(store.list(f"{Folder.IDS}/"))
    # An unreadable block was claimed, too: no shard can claim it again.
    facts.blocks = set(filter(None, map(_number, keys)))
    for key, content in _contents(store, keys, facts).items():
        try:
            shard = str(content["shard"])
            check_shard_name(shard)
        except (KeyError, StreamhouseError) as error:
            facts.error(key, f"it does not say whose ids these are: {error!r}")
            continue
        facts.shards.add(shard)


def _read_shards(store: DirectoryObjects, facts: DirectoryFacts) -> None:
    # The content of a record is replaced every few seconds: only the name counts.
    for folder in (Folder.SHARDS, Folder.HELD):
        for key in store.list(f"{folder}/"):
            shard = key.removeprefix(f"{folder}/").partition("/")[0]
            try:
                check_shard_name(shard)
            except StreamhouseError:
                facts.warning(key, "it is no object of the directory")
                continue
            facts.shards.add(shard)


def _read_names(store: DirectoryObjects, folder: Folder, facts: DirectoryFacts) -> None:
    """Read the newest version of each name, and check that no earlier version is missing."""
    versions: dict[str, set[int]] = {}
    for key in store.list(f"{folder}/"):
        name, number = key.rpartition("/")[0], _number(key)
        if not number or (folder is Folder.TABLES and _path(name) is None):
            facts.warning(key, "it is no object of the directory")
            continue
        versions.setdefault(name, set()).add(number)
    for name, numbers in versions.items():
        for number in sorted(set(range(1, max(numbers))) - numbers):
            # A listing may be outdated by a moment.
            if store.get(_key(name, number)) is None:
                facts.error(
                    _key(name, number),
                    f"it is missing, although version {max(numbers)} came after it: put it back",
                )
    newest = {_key(name, max(numbers)): name for name, numbers in versions.items()}
    contents = _contents(store, newest, facts)
    if folder is Folder.TABLES:
        for key, name in newest.items():
            _add_entry(name, key, contents.get(key), facts)


def _add_entry(
    name: str, key: str, content: Mapping[str, Any] | None, facts: DirectoryFacts
) -> None:
    path = _path(name)
    assert path is not None
    try:
        entry = None if content is None else NameEntry.from_json(content, where=key)
    except CorruptDataError as error:
        facts.error(key, error.message)
        entry = None
    if entry is None:
        facts.unknown.add(path)
    elif entry.state is not NameState.FREE:
        facts.entries[path] = entry


def _contents(
    store: DirectoryObjects, keys: Iterable[str], facts: DirectoryFacts
) -> dict[str, dict[str, Any]]:
    """Return the contents of the existing, whole objects; damage is noted."""

    def read(key: str) -> dict[str, Any] | CorruptDataError | None:
        try:
            data = store.get(key)
            return None if data is None else unseal(key, data)
        except CorruptDataError as error:
            return error

    keys = list(keys)
    with Pool("directory-check", _THREADS) as threads:
        results = dict(zip(keys, threads.map(read, keys), strict=True))
    contents = {}
    for key, content in results.items():
        if isinstance(content, CorruptDataError):
            facts.error(key, content.message)
        elif content is not None:
            contents[key] = content
    return contents


def _key(name: str, number: int) -> str:
    return f"{name}/{number:0{_DIGITS}d}"


def _number(key: str) -> int:
    """Return the number at the end of a key; 0 without a number."""
    digits = key.rpartition("/")[2]
    return int(digits) if len(digits) == _DIGITS and digits.isascii() and digits.isdecimal() else 0


def _path(name: str) -> TablePath | None:
    try:
        return TablePath(*name.split("/")[1:])
    except (TypeError, StreamhouseError):
        return None
