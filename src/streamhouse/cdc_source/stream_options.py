"""Options of a stream: source tables, target tables, and the names of the stream's parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamhouse.cdc_source._source_types import is_key
from streamhouse.cdc_source._stream_progress import FollowedTable
from streamhouse.cdc_source._target_table import SourceTable
from streamhouse.core.errors import InvalidRequestError, SchemaMismatchError
from streamhouse.core.model.table import TablePath

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
    exclude: Sequence[str] = ()
    bucket_count: int = 1
    keyless: bool = False
    snapshot: bool = False

    @property
    def slot(self) -> str:
        """The replication slot and the publication in the source."""
        return f"streamhouse_{self.name}"

    @property
    def snapshot_slot(self) -> str:
        """The replication slot for the snapshot of new tables."""
        return f"streamhousenew_{self.name}"

    def check_new(self, table: SourceTable) -> None:
        """Raise `InvalidRequestError` with the reason why a table cannot be followed, if any.

        The check comes before the publication of the table: a publication changes what the
        database's other users may do with the table.
        """
        why = ""
        if table.has_heirs:
            why = "other tables inherit from it, which are not followed; name those instead"
        elif not table.is_owned:
            why = "only its owner may publish it; make the source's user a member of that role"
        elif table.hides_rows:
            why = (
                "its row level security hides rows from the source's user; give the user BYPASSRLS"
            )
        elif not table.primary_key and not self.keyless:
            why = (
                "it has no primary key; give it one, or append its changes to a log table with"
                " --keyless append"
            )
        elif computed := [name for name in table.primary_key if name in table.left_out]:
            why = (
                f"column '{computed[0]}' of its primary key is generated, and the source does not"
                " send such columns; give it another key"
            )
        elif inexact := [c for c in table.columns if c.name in table.primary_key and not is_key(c)]:
            why = (
                f"column '{inexact[0].name}' of its primary key is {inexact[0].type_name}, of which"
                " two values may be one here; give it another key"
            )
        if why:
            raise InvalidRequestError(why)
        self.check_old_rows(table)

    def check_followed(self, table: SourceTable) -> None:
        """Raise `SchemaMismatchError` if a followed table can no longer be followed."""
        try:
            self.check_old_rows(table)
        except InvalidRequestError as error:
            raise SchemaMismatchError(
                f"'{table.full_name}' cannot be followed any longer: {error}. Changes of it may be"
                " missing: then start with --snapshot, or go on without it with --exclude"
                f" {table.full_name}"
            ) from None

    @staticmethod
    def check_old_rows(table: SourceTable) -> None:
        """Raise `InvalidRequestError` if the database does not say which rows change or go."""
        if table.has_deferrable_key:
            raise InvalidRequestError(
                "its primary key is DEFERRABLE, so PostgreSQL does not send old rows by it; make"
                " the constraint NOT DEFERRABLE"
            )
        for part in table.old_rows:
            where = "" if part.table == table.full_name else f" of partition '{part.table}'"
            if not part.is_logged:
                raise InvalidRequestError(
                    f"partition '{part.table}' is unlogged or foreign, so PostgreSQL sends no"
                    " changes of it"
                )
            if part.identity == "d" and not table.primary_key:
                raise InvalidRequestError(
                    "it has no primary key and no REPLICA IDENTITY, so PostgreSQL would refuse"
                    f" updates and deletes of it once it is published: ALTER TABLE {part.table}"
                    " REPLICA IDENTITY FULL"
                )
            if part.identity == "n" or (part.identity == "i" and not part.columns):
                raise InvalidRequestError(
                    f"the REPLICA IDENTITY{where} is NOTHING, so PostgreSQL would refuse updates"
                    f" and deletes of it once it is published: ALTER TABLE {part.table} REPLICA"
                    " IDENTITY DEFAULT, or FULL"
                )
            if part.identity == "i" and not part.columns.issuperset(table.primary_key):
                lacking = [name for name in table.primary_key if name not in part.columns]
                raise InvalidRequestError(
                    f"the REPLICA IDENTITY{where} is an index without column '{lacking[0]}' of the"
                    f" primary key, so old rows come without it: ALTER TABLE {part.table} REPLICA"
                    " IDENTITY DEFAULT, or FULL"
                )

    def paths(
        self, tables: Sequence[SourceTable], *, beside: Mapping[str, FollowedTable]
    ) -> dict[str, FollowedTable]:
        """Return our table for each of the source's, none of which `beside` has for another.

        Raises `InvalidRequestError` for two tables of one name.
        """
        followed: dict[str, FollowedTable] = {}
        sources = {ours.path: source for source, ours in beside.items()}
        for table in tables:
            path = str(TablePath(self.database, table.target_name()))
            first_source = sources.setdefault(path, table.full_name)
            if first_source != table.full_name:
                raise InvalidRequestError(
                    f"two tables would become '{path}', {first_source} and {table.full_name};"
                    " follow them with two commands"
                )
            followed[table.full_name] = FollowedTable(path, table.oid, table.column_numbers)
        return followed
