"""Commits to the lake of guarded tables, as another engine sends them through the REST catalog.

None may change what a guarded table answers: it is refused with a sentence, or changes no row. The
judge of the request attack reads the tables afterwards.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import ForbiddenError, ServerError
from pyiceberg.manifest import DataFile, FileFormat, ManifestEntryStatus
from pyiceberg.table import Table

from tests.attack.judge import Violation
from tests.support.foreign_deletes import (
    commit_carried_files,
    commit_compaction,
    commit_delete_files,
    equality_delete_file,
    position_delete_file,
)

__all__ = ["attack_lake"]

# What a round says of its snapshot, in the name of nobody.
_OF_A_ROUND: Final = {
    "streamhouse.tiered-offsets": '{"0": 9999, "1": 9999}',
    "streamhouse.tiering-epoch": "1",
    "streamhouse.table-id": "1",
}


def attack_lake(
    endpoint: str,
    tables: tuple[str, ...],
    chance: random.Random,
    *,
    tokens: Mapping[str, str],
    owner: str,
    commits: int,
    statuses: Counter[str],
) -> int:
    """Send so many commits, as somebody; return how many. Raises `Violation` for a wrong answer."""
    for _ in range(commits):
        caller = chance.choice((owner, chance.choice(sorted(tokens))))
        name, change = chance.choice(tables), chance.choice(_CHANGES)
        shown = f"{caller}: {change.__name__} of the lake table {name}"
        table = _catalog(endpoint, tokens[owner]).load_table(name)
        try:
            # Who may not see a table knows what is in it.
            table.catalog = _catalog(endpoint, tokens[caller])
            change(table, chance)
        except (ServerError, AssertionError) as error:
            raise Violation(f"a bug: {shown}: {error!r}") from error
        except Exception as error:
            if isinstance(error, ForbiddenError) and not str(error):
                raise Violation(f"no sentence: {shown}") from error
            statuses[f"{caller} refused-commit"] += 1
        else:
            if caller != owner:
                raise Violation(f"somebody got at a guarded table: {shown}")
            statuses[f"{caller} taken-commit"] += 1
    return commits


def _catalog(endpoint: str, token: str) -> Catalog:
    return load_catalog("lake", type="rest", uri=endpoint, token=token)


def _file_of(table: Table, chance: random.Random) -> DataFile:
    files = [task.file for task in table.scan().plan_files()]
    return chance.choice(sorted(files, key=lambda file: file.file_path))


def _delete_as_no_reader_can(table: Table, chance: random.Random) -> None:
    """Position deletes in another format, or equality deletes."""
    file = _file_of(table, chance)
    kind = chance.choice((FileFormat.ORC, FileFormat.AVRO, None))
    if kind is None:
        ids = pa.table({"id": pa.array([1], pa.int64())})
        deletes = equality_delete_file(table, ids, partition=file.partition)
    else:
        at = [(file.file_path, 0)]
        deletes = position_delete_file(table, at, partition=file.partition, file_format=kind)
    commit_delete_files(table, [deletes])


def _compact(table: Table, _: random.Random) -> None:
    commit_compaction(table)


def _lose_rows(table: Table, chance: random.Random) -> None:
    """Say that it compacts, and leave files out."""
    commit_compaction(table, chance.choice(([], [_file_of(table, chance)])))


def _carry_files(table: Table, chance: random.Random) -> None:
    """Bring rows a second time, as files that were there before."""
    status = chance.choice((ManifestEntryStatus.EXISTING, ManifestEntryStatus.ADDED))
    commit_carried_files(table, [_file_of(table, chance)], status)


def _speak_as_a_round(table: Table, chance: random.Random) -> None:
    """Rows that nobody wrote, in a snapshot that says that a round made it; or none."""
    rows = table.scan().to_arrow().slice(0, chance.choice((0, 3)))
    table.append(rows, snapshot_properties=_some(chance, _OF_A_ROUND))


def _set_properties(table: Table, chance: random.Random) -> None:
    with table.transaction() as change:
        change.set_properties(_some(chance, _OF_A_ROUND))


def _roll_back(table: Table, _: random.Random) -> None:
    oldest = table.metadata.snapshots[0].snapshot_id
    table.manage_snapshots().set_current_snapshot(oldest).commit()


def _some(chance: random.Random, given: Mapping[str, str]) -> dict[str, str]:
    return {name: given[name] for name in chance.sample(sorted(given), chance.randint(1, 3))}


def _delete_keys(table: Table, chance: random.Random) -> None:
    """Delete rows by key; of a log table, whose rows may be deleted, as nobody can read it."""
    if table.name()[-1].endswith("keys"):
        table.delete(chance.choice(("id < 10", "true", "name is not null")))
    else:
        _delete_as_no_reader_can(table, chance)


_CHANGES: Final[tuple[Callable[[Table, random.Random], None], ...]] = (
    _delete_as_no_reader_can,
    _compact,
    _lose_rows,
    _carry_files,
    _speak_as_a_round,
    _set_properties,
    _roll_back,
    _delete_keys,
)
