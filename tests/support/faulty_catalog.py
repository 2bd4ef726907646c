"""An Iceberg catalog on SQLite whose commits go wrong on order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.update import TableRequirement, TableUpdate

from streamhouse.storage_service.model.lake import LakeCatalog

__all__ = ["FaultyCatalog", "faulty_lake_catalog"]

Fault = Callable[["FaultyCatalog", "Commit"], CommitTableResponse]


class Commit:
    """One commit on its way: `land` makes it, whenever it is called."""

    def __init__(self, land: Callable[[], CommitTableResponse]) -> None:
        self.land = land


class FaultyCatalog(SqlCatalog):
    """Takes the next of `faults` for each commit to an existing table; none left: all is well.

    Catalogs are made by name from properties, so what a test orders is kept by the class.
    """

    faults: list[Fault] = []  # noqa: RUF012 - shared by all instances on purpose
    late: list[Commit] = []  # noqa: RUF012 - shared by all instances on purpose
    load_error: BaseException | None = None

    @classmethod
    def reset(cls) -> None:
        cls.faults, cls.late, cls.load_error = [], [], None

    def load_table(self, identifier: Any) -> Table:
        if FaultyCatalog.load_error is not None:
            raise FaultyCatalog.load_error
        return super().load_table(identifier)

    def commit_table(
        self,
        table: Table,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> CommitTableResponse:
        def land() -> CommitTableResponse:
            return SqlCatalog.commit_table(self, table, requirements, updates)

        if not FaultyCatalog.faults or not table.metadata_location.endswith(".json"):
            return land()
        return FaultyCatalog.faults.pop(0)(self, Commit(land))


def refused(_: FaultyCatalog, commit: Commit) -> CommitTableResponse:
    """The catalog says that somebody else was faster."""
    raise CommitFailedException("another commit was faster")


def lost_answer(_: FaultyCatalog, commit: Commit) -> CommitTableResponse:
    """The commit lands, and its answer never comes."""
    commit.land()
    raise TimeoutError("no answer")


def lost_request(_: FaultyCatalog, commit: Commit) -> CommitTableResponse:
    """The commit never arrives."""
    raise CommitStateUnknownException("no answer")


def late(_: FaultyCatalog, commit: Commit) -> CommitTableResponse:
    """The commit is still on its way when the caller gives up waiting."""
    FaultyCatalog.late.append(commit)
    raise CommitStateUnknownException("no answer yet")


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
