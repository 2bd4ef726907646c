"""Commits to tables through the REST catalog: checked against the live tables, then landed.

What a commit promises:
- its requirements hold for the very metadata that it replaces, and so do the checks of
  `commit_guard.py` and `added_files.py`
- several tables change together or not at all
- an error other than `UnknownOutcomeError` means that nothing was committed
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from pyiceberg.catalog import Catalog, MetastoreCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableRequest, StagedTable, Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.update import (
    AssertCreate,
    AssertRefSnapshotId,
    AssertTableUUID,
    TableRequirement,
    update_table_metadata,
)

from streamhouse.storage_service.errors import (
    CommitConflictError,
    InvalidRequestError,
    TableExistsError,
    UnsupportedError,
)
from streamhouse.storage_service.model.lake import SERVICE_ID_PROPERTY
from streamhouse.storage_service.rest_catalog.added_files import check_added_files
from streamhouse.storage_service.rest_catalog.catalog_errors import catalog_errors
from streamhouse.storage_service.rest_catalog.commit_guard import (
    check_commit,
    covered_offsets,
    new_foreign_snapshots,
    owner_of,
    protecting_table,
)
from streamhouse.storage_service.rest_catalog.lake_sql_catalog import LakeSqlCatalog
from streamhouse.storage_service.rest_catalog.live_tables import LiveTables
from streamhouse.storage_service.rest_catalog.sql_commits import StagedCommit, commit_staged

__all__ = ["Landed", "TableCommits", "check_new_table"]

_logger = logging.getLogger(__name__)

Identifier = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """A table's metadata after a commit."""

    metadata_location: str | None
    metadata: TableMetadata


class TableCommits:
    """Commits to one catalog. Thread-safe as far as the catalog is."""

    def __init__(self, catalog: Catalog, tables: LiveTables) -> None:
        self._catalog = catalog
        self._tables = tables

    def commit(self, changes: Sequence[tuple[Identifier, CommitTableRequest]]) -> list[Landed]:
        """Commit to every table, or to none; see the module for what errors mean."""
        names = [identifier for identifier, _ in changes]
        if not changes or len(set(names)) < len(names):
            raise InvalidRequestError("a commit must name its tables, each once")
        if not isinstance(self._catalog, SqlCatalog):
            if len(changes) > 1:
                raise UnsupportedError(
                    f"catalog '{self._catalog.name}' commits one table at a time; only a SQL"
                    " catalog commits several together"
                )
            return [self._commit_one(*changes[0])]
        with catalog_errors(f"prepare a commit to {_names(names)}"):
            commits = [self._stage(self._catalog, *change) for change in changes]
        changed = [c for c in commits if c.base is None or c.staged.metadata != c.base.metadata]
        if changed:
            with catalog_errors(f"commit to {_names(names)}", is_commit=True):
                commit_staged(self._catalog, changed)
            self._remember(changed)
            self._delete_old_metadata(changed)
        return [_landed(commit) for commit in commits]

    def _stage(
        self, catalog: SqlCatalog, identifier: Identifier, request: CommitTableRequest
    ) -> StagedCommit:
        base = self._load(identifier, request.requirements)
        staged = catalog._update_and_stage_table(
            base, identifier, request.requirements, request.updates
        )
        self._check(identifier, base, staged.metadata)
        return StagedCommit(base=base, staged=staged)

    def _commit_one(self, identifier: Identifier, request: CommitTableRequest) -> Landed:
        """Commit through the catalog itself, asserting the state that was checked."""
        with catalog_errors(f"prepare a commit to {_names([identifier])}"):
            base = self._load(identifier, request.requirements)
            requirements = request.requirements
            if base is None:
                empty = MetastoreCatalog._empty_table_metadata()
                new = update_table_metadata(empty, request.updates, enforce_validation=True)
                table: Table = self._catalog.create_table_transaction(identifier, Schema())._table
            else:
                for requirement in requirements:
                    requirement.validate(base.metadata)
                new = update_table_metadata(base.metadata, request.updates)
                requirements = (*requirements, *_state_of(base.metadata))
                table = base
            self._check(identifier, base, new)
        with catalog_errors(f"commit to {_names([identifier])}", is_commit=True):
            done = self._catalog.commit_table(table, requirements, request.updates)
        return Landed(metadata_location=done.metadata_location, metadata=done.metadata)

    def _load(
        self, identifier: Identifier, requirements: Sequence[TableRequirement]
    ) -> Table | None:
        is_creation = any(isinstance(r, AssertCreate) for r in requirements)
        try:
            table = self._catalog.load_table(identifier)
        except NoSuchTableError:
            if not is_creation:
                raise
            return None
        if is_creation:
            raise CommitConflictError(f"lake table '{'.'.join(identifier)}' exists")
        return table

    def _check(self, identifier: Identifier, base: Table | None, new: TableMetadata) -> None:
        name = ".".join(identifier)
        if base is None:
            check_new_table(identifier, new.properties, self._tables)
            return
        live = protecting_table(base.metadata, self._tables)
        if live is None:
            if protecting_table(new, self._tables) is not None:
                check_new_table(identifier, new.properties, self._tables)
            return
        check_commit(name, base.metadata, new, live)
        covered = covered_offsets(base.metadata, live)
        foreign = new_foreign_snapshots(base.metadata, new, live)
        check_added_files(name, new, foreign, live, covered=covered, io=base.io)

    def _remember(self, commits: Sequence[StagedCommit]) -> None:
        if isinstance(self._catalog, LakeSqlCatalog):
            for commit in commits:
                location, metadata = commit.staged.metadata_location, commit.staged.metadata
                assert location is not None, "it was written there"
                self._catalog.committed(location, metadata, before=commit.base)

    def _delete_old_metadata(self, commits: Sequence[StagedCommit]) -> None:
        for commit in commits:
            if commit.base is None:
                continue
            try:
                self._catalog._delete_old_metadata(
                    commit.staged.io, commit.base.metadata, commit.staged.metadata
                )
            except Exception:  # noqa: BLE001 - the commit has landed; a file too many is harmless
                _logger.warning("event=metadata_left table=%s", ".".join(commit.staged.name()))


def check_new_table(identifier: Identifier, properties: dict[str, str], tables: LiveTables) -> None:
    """Refuse a new lake table under the name of a live table, but not tiering's own.

    Raises `TableExistsError`.
    """
    name = ".".join(identifier)
    owner = owner_of(properties)
    # A table's full history lies beside it, as in db.t$changelog.
    live = tables.named(name.partition("$")[0])
    if live is None:
        is_ours = properties.get(SERVICE_ID_PROPERTY) == tables.service_id
        live = tables.with_id(owner) if is_ours and owner is not None else None
        if live is None or name.startswith(str(live.info.path)):
            return
    elif owner == live.info.table_id:
        return
    raise TableExistsError(
        f"lake table '{name}' belongs to the streamhouse table '{live.info.path}', which tiering"
        " makes it for; choose another name"
    )


def _state_of(metadata: TableMetadata) -> tuple[TableRequirement, ...]:
    snapshot = metadata.snapshot_by_name(MAIN_BRANCH)
    current = {
        "ref": MAIN_BRANCH,
        "snapshot-id": None if snapshot is None else snapshot.snapshot_id,
    }
    return (
        AssertTableUUID(uuid=metadata.table_uuid),
        AssertRefSnapshotId.model_validate(current),
    )


def _landed(commit: StagedCommit) -> Landed:
    if commit.base is not None and commit.staged.metadata == commit.base.metadata:
        kept: Table = commit.base
        return Landed(metadata_location=kept.metadata_location, metadata=kept.metadata)
    staged: StagedTable = commit.staged
    return Landed(metadata_location=staged.metadata_location, metadata=staged.metadata)


def _names(identifiers: Sequence[Identifier]) -> str:
    return ", ".join(f"lake table '{'.'.join(identifier)}'" for identifier in identifiers)
