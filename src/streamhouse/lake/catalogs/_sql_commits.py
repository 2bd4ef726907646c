"""Commits to tables of a SQL catalog, to several tables in one database transaction.

pyiceberg's own commit takes one table, leaves the new metadata file behind when it loses, and does
not say whether the database was asked to commit. Here
- all tables of a commit change or none
- a commit that is known to have failed leaves no file behind
- a failure while the database commits is `UnknownOutcomeError`, and its files stay
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pyiceberg.catalog import Catalog
from pyiceberg.catalog.sql import IcebergTables, SqlCatalog
from pyiceberg.table import StagedTable, Table
from sqlalchemy import CursorResult, insert, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.orm import Session

from streamhouse.core.errors import (
    CommitConflictError,
    TableExistsError,
    UnavailableError,
    UnknownOutcomeError,
)
from streamhouse.lake.iceberg_errors import sentence_of

__all__ = ["StagedCommit", "commit_staged"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedCommit:
    """The change of a table; `base` is None for a new table."""

    base: Table | None
    staged: StagedTable


def commit_staged(catalog: SqlCatalog, commits: Sequence[StagedCommit]) -> None:
    """Write the metadata files and make all of them current, or none.

    Raises:
        CommitConflictError: a table has changed since it was loaded; nothing was committed.
        TableExistsError: a table to be created is there; nothing was committed.
        UnavailableError: the database could not be asked; nothing was committed.
        UnknownOutcomeError: the database was asked to commit and did not answer.
    """
    with _files_of(catalog, commits) as written, Session(catalog.engine) as session:
        try:
            # Always in the same order: two commits would wait for each other's rows for ever.
            for commit in sorted(commits, key=lambda commit: commit.staged.name()):
                _replace_row(catalog, session, commit)
        except SQLAlchemyError as error:
            raise UnavailableError(
                f"catalog '{catalog.name}' could not be asked: {sentence_of(error)}; nothing was"
                " committed"
            ) from error
        # From here on whatever goes wrong, up to the end of this process, leaves the outcome open.
        written.clear()
        _end(session, name=catalog.name)


def _end(session: Session, *, name: str) -> None:
    try:
        session.commit()
    except Exception as error:
        raise UnknownOutcomeError(
            f"catalog '{name}' did not say whether it has committed: {sentence_of(error)}; load the"
            " table before committing anew"
        ) from error


@contextlib.contextmanager
def _files_of(catalog: SqlCatalog, commits: Sequence[StagedCommit]) -> Iterator[list[StagedTable]]:
    """Write the metadata files; if the block fails, delete the files still in the list."""
    written: list[StagedTable] = []
    try:
        for commit in commits:
            staged = commit.staged
            assert staged.metadata_location is not None
            written.append(staged)
            _write(catalog, staged, staged.metadata_location)
        yield written
    except BaseException:
        for staged in written:
            with contextlib.suppress(OSError):
                staged.io.delete(staged.metadata_location)
        raise


def _write(catalog: SqlCatalog, staged: StagedTable, location: str) -> None:
    try:
        catalog._write_metadata(staged.metadata, staged.io, location)
    except NotImplementedError:
        raise
    except Exception as error:
        # Each file system has its own errors; the catalog was not touched.
        raise UnavailableError(
            f"cannot write lake metadata '{location}': {error}; nothing was committed"
        ) from error


def _replace_row(catalog: SqlCatalog, session: Session, commit: StagedCommit) -> None:
    identifier = commit.staged.name()
    namespace = Catalog.namespace_to_string(Catalog.namespace_from(identifier))
    table = Catalog.table_name_from(identifier)
    location = commit.staged.metadata_location
    if commit.base is None:
        row = catalog._create_table_row(namespace, table, location)
        try:
            session.execute(insert(IcebergTables).values(**row))
        except IntegrityError as error:
            raise TableExistsError(f"lake table '{namespace}.{table}' exists") from error
        return
    change = (
        update(IcebergTables)
        .where(
            IcebergTables.catalog_name == catalog.name,
            IcebergTables.table_namespace == namespace,
            IcebergTables.table_name == table,
            IcebergTables.metadata_location == commit.base.metadata_location,
        )
        .values(
            metadata_location=location, previous_metadata_location=commit.base.metadata_location
        )
    )
    changed = cast("CursorResult[Any]", session.execute(change))
    if changed.rowcount != 1:
        raise CommitConflictError(
            f"lake table '{namespace}.{table}' was changed by another commit; load it again and"
            " commit anew"
        )
