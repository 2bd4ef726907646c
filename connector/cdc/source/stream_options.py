"""What a stream is told: which tables it follows, as what, and how its parts are named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamhouse.connector.cdc.source.progress import FollowedTable
from streamhouse.connector.cdc.source.target_table import SourceTable
from streamhouse.storage_service.errors import InvalidRequestError, SchemaMismatchError
from streamhouse.storage_service.model.table import TablePath

__all__ = ["StreamOptions", "check_not_renamed"]


def check_not_renamed(name: str, ours: FollowedTable, now: Mapping[str, int]) -> None:
    """Raise `SchemaMismatchError` if a column of table `name` is now called otherwise."""
    renamed = ours.renamed_column(now)
    if renamed is not None:
        raise SchemaMismatchError(
            f"table '{ours.path}': column '{renamed[0]}' of '{name}' was renamed to"
            f" '{renamed[1]}', which is not followed. Rename it back, or start with --snapshot to"
            " read all tables anew"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """What is followed, and where to: `name` names the slot, the publication and the position."""

    patterns: Sequence[str]
    database: str
    name: str
    bucket_count: int = 1
    keyless: bool = False
    snapshot: bool = False

    @property
    def slot(self) -> str:
        """The replication slot and the publication in the source."""
        return f"streamhouse_{self.name}"

    @property
    def snapshot_slot(self) -> str:
        """The replication slot that is there while new tables are read."""
        return f"streamhousenew_{self.name}"

    def paths(
        self, tables: Sequence[SourceTable], *, beside: Mapping[str, FollowedTable]
    ) -> dict[str, FollowedTable]:
        """Return our table for each of the source's, none of which `beside` has for another.

        Raises `InvalidRequestError` that names the tables for which that is not possible.
        """
        keyless = [table.full_name for table in tables if not table.primary_key]
        if keyless and not self.keyless:
            raise InvalidRequestError(
                f"these tables have no primary key: {', '.join(keyless)}. Give them one, name the"
                " other tables with --tables, or append their changes to log tables with"
                " --keyless append"
            )
        found: dict[str, FollowedTable] = {}
        taken = {ours.path: source for source, ours in beside.items()}
        for table in tables:
            path = str(TablePath(self.database, table.target_name()))
            other = taken.setdefault(path, table.full_name)
            if other != table.full_name:
                raise InvalidRequestError(
                    f"two tables would become '{path}', {other} and {table.full_name}; follow"
                    " them with two commands"
                )
            found[table.full_name] = FollowedTable(path, table.oid, table.column_numbers)
        return found
