"""All rows of a table by their keys, as a plan has them: read at one cut, or brought up to it.

An earlier cut's rows become those of a later one by the changes in between. Where anything stands
against that, the later one is read as a whole.
"""

from __future__ import annotations

import json
import logging
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.connector.lookup._key_rows import KeyRows, Keys
from streamhouse.connector.lookup._lookup_plan import LookupPlan
from streamhouse.core.errors import SchemaMismatchError, StreamhouseError
from streamhouse.core.model.changelog import CHANGE_TYPE_NAMES, DELETE
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN

__all__ = ["SharedCut", "TableCut", "keys_in", "read_columns", "shaped", "whole_rows"]

_log = logging.getLogger(__name__)


class TableCut(Protocol):
    """The whole table at one instant."""

    @property
    def name(self) -> str | None:
        """What no other cut has, nor any other table; None if that cannot be told."""
        ...

    @property
    def changes(self) -> int:
        """How many changes a read goes through beside the lake."""
        ...

    @property
    def place(self) -> Any:
        """Where it is among the cuts of this table, as JSON."""
        ...

    def since(self, place: Any) -> int | None:
        """Return how many changes lead here from the cut that was there; None if they do not."""
        ...

    def read(self, columns: list[str]) -> pa.Table:
        """Return some columns of all rows."""
        ...

    def read_since(self, place: Any, columns: list[str]) -> pa.Table:
        """Return the rows that are newer than the cut that was there, and those deleted since.

        These are told apart by `__change_type`; a key that is among both has a row.
        """
        ...


class SharedCut(NamedTuple):
    """A cut, which has a name, as the tasks of an executor share it (`shared_tables.Cut`)."""

    plan: LookupPlan
    cut: TableCut
    cut_name: str

    @property
    def name(self) -> str:
        """What tells its rows from those of another plan or cut."""
        return json.dumps([self.cut_name, _form_of(self.plan)])

    @property
    def form(self) -> str | None:
        """What tells its rows from those of another plan or table."""
        plan = self.plan
        # Runs would have to be cut open for each row that comes or goes.
        return (
            json.dumps([plan.endpoint, plan.table, _form_of(plan)]) if plan.is_whole_key else None
        )

    @property
    def place(self) -> Any:
        """Where the cut is among the others of the table."""
        return self.cut.place

    def since(self, place: Any) -> int | None:
        """Return how many changes lead here from the cut that was there."""
        return self.cut.since(place)

    def made(self) -> KeyRows:
        """Read the table."""
        return whole_rows(self.plan, self.cut)

    def brought(self, table: KeyRows, place: Any) -> KeyRows | None:
        """Take the changes since that cut into its table; None if they cannot be had, or taken."""
        if not self.cut.since(place):
            return table
        plan = self.plan
        try:
            changed = self.cut.read_since(place, read_columns(plan)).combine_chunks()
        except (StreamhouseError, OSError) as error:
            _log.info("table=%s is read as a whole, not its changes alone: %s", plan.table, error)
            return None
        is_delete = pc.equal(changed.column(CHANGE_TYPE_COLUMN), CHANGE_TYPE_NAMES[DELETE])
        deleted, rows = changed.filter(is_delete), changed.filter(pc.invert(is_delete))
        is_taken = table.take_in(keys_in(plan, deleted), keys_in(plan, rows), shaped(plan, rows))
        return table if is_taken else None


def whole_rows(plan: LookupPlan, cut: TableCut) -> KeyRows:
    """Read all rows of a cut."""
    table = cut.read(read_columns(plan)).combine_chunks()
    return KeyRows.complete(
        plan.row_schema, keys_in(plan, table), shaped(plan, table), has_runs=not plan.is_whole_key
    )


def read_columns(plan: LookupPlan) -> list[str]:
    """Return the columns that are read: the key's, and those that are looked up."""
    names = list(plan.key_schema.names)
    return [*names, *(name for name in plan.columns if name not in names)]


def keys_in(plan: LookupPlan, rows: pa.Table) -> Keys:
    """Return the keys of the table's rows."""
    return Keys([_one_array(rows.column(f.name).cast(f.type)) for f in plan.key_schema])


def shaped(plan: LookupPlan, rows: pa.Table) -> pa.RecordBatch:
    """Return the wanted columns of the table's rows as the plan has them."""
    arrays = []
    for name, field in zip(plan.columns, plan.row_schema, strict=True):
        column = _one_array(rows.column(name))
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except pa.ArrowException as error:
                raise SchemaMismatchError(
                    f"table '{plan.table}': column '{name}' is {column.type} now, and was"
                    f" {field.type} when the lookup was made; make it again"
                ) from error
        arrays.append(column)
    return pa.RecordBatch.from_arrays(arrays, schema=plan.row_schema)


def _form_of(plan: LookupPlan) -> list[str]:
    """Return what tells the rows of a plan from those of another one, of the same cut."""
    schemas = (plan.key_schema, plan.row_schema)
    forms = [schema.serialize().to_pybytes().hex() for schema in schemas]
    return [*forms, *plan.columns, str(plan.is_whole_key)]


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    joined = column.combine_chunks()
    return joined.combine_chunks() if isinstance(joined, pa.ChunkedArray) else joined
