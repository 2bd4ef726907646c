"""What the store's directory says of a service's shards, with whatever is wrong with it.

Unlike a shard, which refuses to go on with damage, this reads on: each object is a finding of its
own. Reads only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from streamhouse.core.errors import CorruptDataError, StreamhouseError
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.operations.findings import Finding, Severity
from streamhouse.storage_service.ownership.journal.names import DIRECTORY
from streamhouse.storage_service.ownership.journal.store.object_store import ObjectStore
from streamhouse.storage_service.ownership.shards.chain import DirectoryObjects, DirectoryStore
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
    """What is in the directory. `entries` has the names that are not free."""

    service_id: str = ""
    first_id: int = 0
    """Ids below it are the first shard's own; above it, each is in a block of `blocks`."""
    entries: dict[TablePath, NameEntry] = field(default_factory=dict)
    unknown: set[TablePath] = field(default_factory=set)
    """Names of which the newest version cannot be read."""
    blocks: set[int] = field(default_factory=set)
    shards: set[str] = field(default_factory=set)
    """Every shard that anything names."""
    findings: list[Finding] = field(default_factory=list)

    def error(self, key: str, problem: str) -> None:
        """Note what makes a table unreachable, or may give one name or id twice."""
        self.findings.append(Finding(Severity.ERROR, DIRECTORY + key, problem))

    def warning(self, key: str, problem: str) -> None:
        """Note what harms nothing."""
        self.findings.append(Finding(Severity.WARNING, DIRECTORY + key, problem))


def read_directory(objects: ObjectStore) -> DirectoryFacts:
    """Read all of it. Raises a `StreamhouseError` if the store does not answer."""
    facts, store = DirectoryFacts(), DirectoryObjects(objects)
    _read_service(store, facts)
    _read_blocks(store, facts)
    _read_shards(store, facts)
    for folder in (Folder.DATABASES, Folder.TABLES):
        _read_names(store, folder, facts)
    facts.shards |= {entry.shard for entry in facts.entries.values()}
    return facts


def _read_service(store: DirectoryStore, facts: DirectoryFacts) -> None:
    content = _contents(store, [Folder.SERVICE], facts).get(Folder.SERVICE)
    if content is None:
        if not facts.findings:
            facts.error(Folder.SERVICE, "it is missing: nobody knows which service this is")
        return
    try:
        facts.service_id = str(content["service_id"])
        facts.first_id = int(content["first_block"]) * BLOCK_IDS
    except (KeyError, TypeError, ValueError) as error:
        facts.error(Folder.SERVICE, f"it names no service: {error!r}")


def _read_blocks(store: DirectoryStore, facts: DirectoryFacts) -> None:
    keys = list(store.list(f"{Folder.IDS}/"))
    # Also one that cannot be read was claimed: nobody can claim it again.
    facts.blocks = set(filter(None, map(_number, keys)))
    for key, content in _contents(store, keys, facts).items():
        try:
            shard = str(content["shard"])
            check_shard_name(shard)
        except (KeyError, StreamhouseError) as error:
            facts.error(key, f"it does not say whose ids these are: {error!r}")
            continue
        facts.shards.add(shard)


def _read_shards(store: DirectoryStore, facts: DirectoryFacts) -> None:
    # What is in a record is replaced every few seconds: only its name counts.
    for folder in (Folder.SHARDS, Folder.HELD):
        for key in store.list(f"{folder}/"):
            shard = key.removeprefix(f"{folder}/").partition("/")[0]
            try:
                check_shard_name(shard)
            except StreamhouseError:
                facts.warning(key, "it is no object of the directory")
                continue
            facts.shards.add(shard)


def _read_names(store: DirectoryStore, folder: Folder, facts: DirectoryFacts) -> None:
    """Read the newest version of each name, and see that none before it is missing."""
    versions: dict[str, set[int]] = {}
    for key in store.list(f"{folder}/"):
        name, number = key.rpartition("/")[0], _number(key)
        if not number or (folder is Folder.TABLES and _path(name) is None):
            facts.warning(key, "it is no object of the directory")
            continue
        versions.setdefault(name, set()).add(number)
    for name, numbers in versions.items():
        for number in sorted(set(range(1, max(numbers))) - numbers):
            # A listing may be of a moment ago.
            if store.get(_key(name, number)) is None:
                facts.error(
                    _key(name, number),
                    f"it is missing, although version {max(numbers)} came after it: put it back",
                )
    newest = {_key(name, max(numbers)): name for name, numbers in versions.items()}
    contents = _contents(store, newest, facts)
    if folder is Folder.TABLES:
        for key, name in newest.items():
            _take_entry(name, key, contents.get(key), facts)


def _take_entry(
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
    store: DirectoryStore, keys: Iterable[str], facts: DirectoryFacts
) -> dict[str, dict[str, Any]]:
    """Return what is in the objects that are there and whole; damage is noted."""

    def read(key: str) -> dict[str, Any] | CorruptDataError | None:
        try:
            data = store.get(key)
            return None if data is None else unseal(key, data)
        except CorruptDataError as error:
            return error

    keys = list(keys)
    with ThreadPoolExecutor(_THREADS, "directory-check") as threads:
        found = dict(zip(keys, threads.map(read, keys), strict=True))
    contents = {}
    for key, content in found.items():
        if isinstance(content, CorruptDataError):
            facts.error(key, content.message)
        elif content is not None:
            contents[key] = content
    return contents


def _key(name: str, number: int) -> str:
    return f"{name}/{number:0{_DIGITS}d}"


def _number(key: str) -> int:
    """Return the number that a key ends with; 0 for what has none."""
    digits = key.rpartition("/")[2]
    return int(digits) if len(digits) == _DIGITS and digits.isascii() and digits.isdecimal() else 0


def _path(name: str) -> TablePath | None:
    try:
        return TablePath(*name.split("/")[1:])
    except (TypeError, StreamhouseError):
        return None
