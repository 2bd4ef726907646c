"""Commits to tables through the REST catalog: checked against the live tables, then landed.

What a commit promises:
- the requirements, and the checks of `_commit_guard.py` and `_outside_changes.py`, hold for exactly
  the replaced metadata
- several tables change together or not at all
- after an error other than `UnknownOutcomeError` nothing was committed
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyiceberg.catalog import Catalog, MetastoreCatalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableRequest, Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER_ID
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AddSortOrderUpdate,
    AssertCreate,
    AssertRefSnapshotId,
    AssertTableUUID,
    SetDefaultSortOrderUpdate,
    TableRequirement,
    TableUpdate,
    update_table_metadata,
)

from streamhouse.core.errors import (
    CommitConflictError,
    InvalidRequestError,
    TableExistsError,
    UnknownOutcomeError,
    UnsupportedError,
)
from streamhouse.core.model.lake.facts import SERVICE_ID_PROPERTY
from streamhouse.lake.catalogs._format_version import applicable, metadata_text
from streamhouse.lake.catalogs._sql_catalog import LakeSqlCatalog
from streamhouse.lake.catalogs._sql_commits import StagedCommit, commit_staged
from streamhouse.lake.catalogs.guarded_catalog import check_updates, guard_of
from streamhouse.lake.catalogs.rest_catalog import commit_many, offers_commit_many
from streamhouse.lake.guards._commit_guard import (
    check_commit,
    covered_offsets,
    new_foreign_snapshots,
    owner_of,
    protecting_table,
)
from streamhouse.lake.guards.served_tables import ServedTables
from streamhouse.lake.iceberg_errors import catalog_errors, sentence_of
from streamhouse.lake.snapshots._coverage import role_of
from streamhouse.lake.snapshots._outside_changes import check_outside_commit
from streamhouse.lake.snapshots._table_files import check_new_files

__all__ = ["LakeMetadata", "TableCommits", "check_new_table", "commit_request"]

_logger = logging.getLogger(__name__)

Identifier = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeMetadata:
    """A table's metadata, and its file; None for a table still to be created."""

    metadata_location: str | None
    metadata: TableMetadata

    @classmethod
    def of(cls, table: Table) -> LakeMetadata:
        """Return that of a table."""
        return cls(metadata_location=table.metadata_location, metadata=table.metadata)

    @property
    def table_location(self) -> str:
        """Where the table's files lie."""
        return self.metadata.location

    def to_text(self, *, only_referenced: bool = False) -> str:
        """Return the metadata as JSON; `only_referenced` leaves out snapshots without a ref."""
        text = metadata_text(self.metadata)
        if not only_referenced:
            return text
        value = json.loads(text)
        referenced_ids = {reference.snapshot_id for reference in self.metadata.refs.values()}
        value["snapshots"] = [s for s in value["snapshots"] if s["snapshot-id"] in referenced_ids]
        return json.dumps(value)


class TableCommits:
    """Commits to one catalog. Thread-safe as far as the catalog is."""

    def __init__(self, catalog: Catalog, tables: ServedTables) -> None:
        self._catalog = catalog
        self._tables = tables

    def commit(self, identifier: Identifier, request: CommitTableRequest) -> LakeMetadata:
        """Commit to one table; see the module for what errors mean."""
        if isinstance(self._catalog, SqlCatalog):
            return self._commit_sql(self._catalog, [(identifier, request)])[0]
        with catalog_errors(f"prepare a commit to {_names([identifier])}"):
            base, checked = self._checked(identifier, request)
            if base is None:
                base = self._catalog.create_table_transaction(identifier, Schema())._table
        with catalog_errors(f"commit to {_names([identifier])}", is_commit=True, is_checked=True):
            try:
                response = self._catalog.commit_table(base, checked.requirements, checked.updates)
            except CommitFailedException:
                landed_table = self._landed_before([(identifier, request)])
                if landed_table is None:
                    raise
                return LakeMetadata.of(landed_table)
        return LakeMetadata(
            metadata_location=response.metadata_location, metadata=response.metadata
        )

    def _landed_before(
        self, changes: Sequence[tuple[Identifier, CommitTableRequest]]
    ) -> Table | None:
        """Return a table as proof that the refused commit has landed before; None without proof.

        A proxy may have sent the commit twice: the first landed, and made the second fail. Raises
        `UnknownOutcomeError` when the catalog cannot answer.
        """
        for identifier, request in changes:
            added = [u.snapshot for u in request.updates if isinstance(u, AddSnapshotUpdate)]
            if added:
                try:
                    table = self._catalog.load_table(identifier)
                except Exception as error:
                    raise UnknownOutcomeError(
                        f"a commit to {_names([identifier])} was refused, perhaps because it had"
                        f" landed, and the catalog cannot be asked: {sentence_of(error)}"
                    ) from error
                has_it = table.metadata.snapshot_by_id(added[0].snapshot_id) is not None
                return table if has_it else None
        return None

    def commit_all(self, changes: Sequence[tuple[Identifier, CommitTableRequest]]) -> None:
        """Commit to every table, or to none; see the module for what errors mean.

        Raises `UnsupportedError` when the catalog can change only one table at a time.
        """
        names = [identifier for identifier, _ in changes]
        if not changes or len(set(names)) < len(names):
            raise InvalidRequestError("a commit must name its tables, each once")
        if isinstance(self._catalog, SqlCatalog):
            self._commit_sql(self._catalog, changes)
        elif len(changes) == 1:
            self.commit(*changes[0])
        else:
            self._commit_through(changes)

    def _commit_sql(
        self, catalog: SqlCatalog, changes: Sequence[tuple[Identifier, CommitTableRequest]]
    ) -> list[LakeMetadata]:
        names = _names([identifier for identifier, _ in changes])
        with catalog_errors(f"prepare a commit to {names}"):
            commits = [self._stage(catalog, *change) for change in changes]
        changed = [c for c in commits if c.base is None or c.staged.metadata != c.base.metadata]
        if changed:
            with catalog_errors(f"commit to {names}", is_commit=True, is_checked=True):
                commit_staged(catalog, changed)
            self._remember(changed)
            self._delete_old_metadata(changed)
        return [_landed(commit) for commit in commits]

    def _commit_through(self, changes: Sequence[tuple[Identifier, CommitTableRequest]]) -> None:
        """Commit through a REST catalog behind this one, asserting the checked metadata."""
        catalog = self._catalog
        one_by_one = f"catalog '{catalog.name}' commits one table at a time: "
        if not isinstance(catalog, RestCatalog):
            raise UnsupportedError(
                f"{one_by_one}{type(catalog).__name__} cannot change several tables together, which"
                " needs a SQL catalog, or a REST catalog that can"
            )
        if not offers_commit_many(catalog):
            raise UnsupportedError(
                f"{one_by_one}the REST server behind it does not offer transactions/commit"
            )
        names = _names([identifier for identifier, _ in changes])
        with catalog_errors(f"prepare a commit to {names}"):
            checked = [self._checked(*change)[1] for change in changes]
        with catalog_errors(f"commit to {names}", is_commit=True, is_checked=True):
            try:
                commit_many(catalog, checked)
            except CommitFailedException:
                if self._landed_before(changes) is None:
                    raise

    def _stage(
        self, catalog: SqlCatalog, identifier: Identifier, request: CommitTableRequest
    ) -> StagedCommit:
        base = self._load(identifier, request.requirements)
        staged = catalog._update_and_stage_table(
            base, identifier, request.requirements, request.updates
        )
        self._check(identifier, base, staged.metadata)
        return StagedCommit(base=base, staged=staged)

    def _checked(
        self, identifier: Identifier, request: CommitTableRequest
    ) -> tuple[Table | None, CommitTableRequest]:
        """Return the table, None for a new one, and the commit to exactly the state checked here.

        For catalogs that apply the updates themselves.
        """
        base = self._load(identifier, request.requirements)
        if base is None:
            check_updates(identifier, None, request.updates)
            empty = MetastoreCatalog._empty_table_metadata()
            new = update_table_metadata(empty, applicable(request.updates), enforce_validation=True)
            guard_of(self._catalog).check_new_location(identifier, new.location)
            self._check(identifier, None, new)
            return None, request
        check_updates(identifier, base, request.updates)
        for requirement in request.requirements:
            requirement.validate(base.metadata)
        new = update_table_metadata(base.metadata, applicable(request.updates))
        self._check(identifier, base, new)
        requirements = (*request.requirements, *_state_of(base.metadata))
        return base, request.model_copy(update={"requirements": requirements})

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
            io = self._catalog._load_file_io({}, new.location)
            check_new_files(name, None, new, catalog=self._catalog, io=io)
            return
        check_new_files(name, base.metadata, new, catalog=self._catalog, io=base.io)
        live = protecting_table(base.metadata, self._tables)
        if live is None:
            if protecting_table(new, self._tables) is not None:
                check_new_table(identifier, new.properties, self._tables)
            return
        check_commit(name, base.metadata, new, live)
        covered = covered_offsets(base.metadata, live)
        foreign = new_foreign_snapshots(base.metadata, new, live)
        role = role_of(base.metadata.properties)
        check_outside_commit(name, new, foreign, live.info, role, covered=covered, io=base.io)

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


def commit_request(body: Mapping[str, Any], identifier: Identifier) -> CommitTableRequest:
    """Read the commit to a table as the REST protocol writes it."""
    named = {"namespace": list(identifier[:-1]), "name": identifier[-1]}
    with catalog_errors(f"read the commit to '{'.'.join(identifier)}'"):
        request = CommitTableRequest.model_validate({**body, "identifier": named})
    updates = tuple(_with_order_named(request.updates))
    return request.model_copy(update={"updates": updates})


def _with_order_named(updates: Sequence[TableUpdate]) -> Iterator[TableUpdate]:
    """Yield the updates, with the id of the unsorted order if that order was added last.

    The id is 0, less than all others. The library takes the order with the greatest id for the last
    order.
    """
    is_unsorted_last = False
    for update in updates:
        if isinstance(update, AddSortOrderUpdate):
            is_unsorted_last = update.sort_order.is_unsorted
        is_last_named = isinstance(update, SetDefaultSortOrderUpdate) and update.sort_order_id < 0
        if is_last_named and is_unsorted_last:
            unsorted = {"sort-order-id": UNSORTED_SORT_ORDER_ID}
            yield SetDefaultSortOrderUpdate.model_validate(unsorted)
        else:
            yield update


def check_new_table(
    identifier: Identifier, properties: dict[str, str], tables: ServedTables
) -> None:
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


def _landed(commit: StagedCommit) -> LakeMetadata:
    if commit.base is not None and commit.staged.metadata == commit.base.metadata:
        return LakeMetadata.of(commit.base)
    return LakeMetadata.of(commit.staged)


def _names(identifiers: Sequence[Identifier]) -> str:
    return ", ".join(f"lake table '{'.'.join(identifier)}'" for identifier in identifiers)
