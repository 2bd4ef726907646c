"""An Iceberg catalog on SQLite whose commits and loads go wrong on order, and what is then left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    ServerError,
)
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import TableRequirement, TableUpdate

from streamhouse.core.backoff import Backoff
from streamhouse.core.model.lake.facts import LakeCatalog, LakeRole, LakeState
from tests.support.held_step import lower
from tests.support.key_table_world import KeyTableWorld

__all__ = ["FaultyCatalog", "faulty_key_table", "faulty_lake_catalog", "missing_files"]


Fault = Callable[["FaultyCatalog", "Commit"], CommitTableResponse]


class Commit:
    """One commit on its way: `land` makes it, whenever it is called.

    It arrives by itself once `calls_left` more calls of any kind have begun; None: never.
    """

    def __init__(self, land: Callable[[], CommitTableResponse]) -> None:
        self.land = land
        self.calls_left: int | None = None


class FaultyCatalog(SqlCatalog):
    """Takes the next of `faults` for each commit to an existing table; none left: all is well.

    Each load takes the next of `stale`: so many versions ago is what it answers. Catalogs are made
    by name from properties, so what a test orders is kept by the class. What the catalog does
    inside, to make a commit, goes well.
    """

    faults: list[Fault] = []  # noqa: RUF012 - shared by all instances on purpose
    late: list[Commit] = []  # noqa: RUF012 - shared by all instances on purpose
    stale: list[int] = []  # noqa: RUF012 - shared by all instances on purpose
    load_error: BaseException | None = None
    landed_late = 0
    _versions: dict[Any, list[tuple[str, TableMetadata]]] = {}  # noqa: RUF012 - shared on purpose
    _is_inside = False

    @classmethod
    def reset(cls) -> None:
        cls.faults, cls.late, cls.stale, cls.load_error = [], [], [], None
        cls.landed_late, cls._versions = 0, {}

    @classmethod
    def settle(cls) -> None:
        """All that is on its way arrives, and from now on all goes well."""
        cls.faults, cls.stale, cls.load_error = [], [], None
        for commit in cls._taken(lambda _: True):
            cls._arrive(commit)

    @classmethod
    def begin_call(cls) -> None:
        """Let arrive what is due before the next call."""
        for commit in cls.late:
            if commit.calls_left is not None:
                commit.calls_left -= 1
        for commit in cls._taken(lambda c: c.calls_left is not None and c.calls_left < 0):
            cls._arrive(commit)

    @classmethod
    def _taken(cls, is_due: Callable[[Commit], bool]) -> list[Commit]:
        due = [commit for commit in cls.late if is_due(commit)]
        cls.late = [commit for commit in cls.late if commit not in due]
        return due

    @classmethod
    def _arrive(cls, commit: Commit) -> None:
        with contextlib.suppress(Exception):  # nobody waits for the answer any more
            commit.land()
            cls.landed_late += 1

    def load_table(self, identifier: Any) -> Table:
        if FaultyCatalog._is_inside:
            return super().load_table(identifier)
        FaultyCatalog.begin_call()
        if FaultyCatalog.load_error is not None:
            raise FaultyCatalog.load_error
        found = super().load_table(identifier)
        versions = self._remember(found)
        ago = FaultyCatalog.stale.pop(0) if FaultyCatalog.stale else 0
        if ago and len(versions) > 1:
            found.metadata_location, found.metadata = versions[-1 - min(ago, len(versions) - 1)]
        return found

    def _remember(self, table: Table) -> list[tuple[str, TableMetadata]]:
        versions = FaultyCatalog._versions.setdefault(table.name(), [])
        if not versions or versions[-1][0] != table.metadata_location:
            versions.append((table.metadata_location, table.metadata))
        return versions

    def commit_table(
        self,
        table: Table,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> CommitTableResponse:
        def land() -> CommitTableResponse:
            with _inside():
                response = SqlCatalog.commit_table(self, table, requirements, updates)
                self._remember(super(FaultyCatalog, self).load_table(table.name()))
                return response

        FaultyCatalog.begin_call()
        if not FaultyCatalog.faults or not table.metadata_location.endswith(".json"):
            return land()
        return FaultyCatalog.faults.pop(0)(self, Commit(land))


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    before, FaultyCatalog._is_inside = FaultyCatalog._is_inside, True
    try:
        yield
    finally:
        FaultyCatalog._is_inside = before


def well(_: FaultyCatalog, commit: Commit) -> CommitTableResponse:
    """Nothing goes wrong with this one."""
    return commit.land()


def refused(_: FaultyCatalog, commit: Commit) -> CommitTableResponse:
    """The catalog says that somebody else was faster."""
    raise CommitFailedException("another commit was faster")


def conflict_after_landed(_: FaultyCatalog, commit: Commit) -> CommitTableResponse:
    """Something between sent the commit twice: the first landed, the second was refused for it."""
    commit.land()
    raise CommitFailedException("another commit was faster")


def lost_answer(_: FaultyCatalog, commit: Commit) -> CommitTableResponse:
    """The commit lands, and its answer never comes."""
    commit.land()
    raise TimeoutError("no answer")


def server_error_after_landed(_: FaultyCatalog, commit: Commit) -> CommitTableResponse:
    """The commit lands, then something breaks on the other side."""
    commit.land()
    raise ServerError("internal error")


def lost_request(_: FaultyCatalog, commit: Commit) -> CommitTableResponse:
    """The commit never arrives."""
    raise CommitStateUnknownException("no answer")


def late(_: FaultyCatalog, commit: Commit) -> CommitTableResponse:
    """The commit is still on its way when the caller gives up waiting."""
    FaultyCatalog.late.append(commit)
    raise CommitStateUnknownException("no answer yet")


def late_by(calls: int) -> Fault:
    """The commit arrives before the call after `calls` more of any kind."""

    def late_by_calls(catalog: FaultyCatalog, commit: Commit) -> CommitTableResponse:
        commit.calls_left = calls
        return late(catalog, commit)

    return late_by_calls


def catalog_dies(_: FaultyCatalog, commit: Commit) -> CommitTableResponse:
    """The commit lands, then the catalog cannot be reached at all."""
    commit.land()
    FaultyCatalog.load_error = ConnectionError("connection refused")
    raise ConnectionError("connection reset")


def faulty_lake_catalog(folder: Path) -> LakeCatalog:
    """Return a catalog in `folder` that goes wrong on order."""
    return LakeCatalog(
        name="lake",
        properties={
            "py-catalog-impl": f"{FaultyCatalog.__module__}.{FaultyCatalog.__name__}",
            "uri": f"sqlite:///{folder / 'catalog.db'}",
            "warehouse": f"file://{folder / 'warehouse'}",
        },
    )


def missing_files(table: Table) -> list[str]:
    """Return the manifest lists, manifests, data and delete files of any snapshot that are gone."""
    missing: set[str] = set()
    seen: set[str] = set()
    for snapshot in table.metadata.snapshots:
        if not _is_there(snapshot.manifest_list):
            missing.add(snapshot.manifest_list)
            continue
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path in seen:
                continue
            seen.add(manifest.manifest_path)
            if not _is_there(manifest.manifest_path):
                missing.add(manifest.manifest_path)
                continue
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
                if not _is_there(entry.data_file.file_path):
                    missing.add(entry.data_file.file_path)
    return sorted(missing)


def _is_there(uri: str) -> bool:
    return Path(uri.removeprefix("file://")).exists()


def faulty_key_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch, properties: dict[str, str]
) -> Iterator[KeyTableWorld]:
    """A table whose catalog goes wrong as a test tells it, and workers that do not wait."""
    lower(monkeypatch, "landing-backoff", Backoff(first_s=0.0, most_s=0.0))
    FaultyCatalog.reset()
    with KeyTableWorld(folder, catalog=faulty_lake_catalog(folder)) as world:
        info = world.create_key_table(properties=properties)
        # The lake tables exist before the first fault: faults are those of commits.
        lake = world.tiering.lake()
        lake.open_or_create(info, LakeState())
        if info.properties().datalake_changelog:
            lake.open_or_create(info, None, role=LakeRole.CHANGES)
        yield world
    FaultyCatalog.reset()
