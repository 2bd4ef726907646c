"""All rows of a table by key, for a plan: a full read of a cut, or an updated earlier cut.

The changes in between turn the rows of an earlier cut into the rows of a later cut. If the changes
are not enough, the later cut is read in full.
"""

from __future__ import annotations

import json
import logging
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.connector.lookup._key_rows import KeyRows, Keys
from streamhouse.connector.lookup._lookup_plan import LookupPlan
from streamhouse.connector.lookup._table_cut import CutOfTable
from streamhouse.core.errors import SchemaMismatchError, StreamhouseError
from streamhouse.core.model.changelog import CHANGE_TYPE_NAMES, DELETE
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN, type_name

__all__ = ["SharedCut", "keys_in", "read_columns", "shaped", "whole_rows"]

_log = logging.getLogger(__name__)


class SharedCut(NamedTuple):
    """A named cut, shared by the tasks of an executor (`SharedTables`)."""

    plan: LookupPlan
    cut: CutOfTable
    cut_name: str

    @property
    def name(self) -> str:
        """The identity of the cut and the plan."""
        return json.dumps([self.cut_name, _form_of(self.plan)])

    @property
    def form(self) -> str | None:
        """The identity of the table and the plan; None if changes cannot be applied."""
        plan = self.plan
        # Each added or deleted row would split a run.
        return (
            json.dumps([plan.endpoint, plan.table, _form_of(plan)]) if plan.is_whole_key else None
        )

    @property
    def place(self) -> Any:
        """The position of the cut among the cuts of the table."""
        return self.cut.place

    def since(self, place: Any) -> int | None:
        """Return the number of changes since the cut at `place`."""
        return self.cut.since(place)

    def load(self) -> KeyRows:
        """Read the table."""
        return whole_rows(self.plan, self.cut)

    def advance(self, table: KeyRows, place: Any) -> KeyRows | None:
        """Apply the changes since the cut at `place` to its table; None if impossible."""
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
        is_applied = table.take_in(keys_in(plan, deleted), keys_in(plan, rows), shaped(plan, rows))
        return table if is_applied else None


def whole_rows(plan: LookupPlan, cut: CutOfTable) -> KeyRows:
    """Read all rows of a cut."""
    table = cut.read(read_columns(plan)).combine_chunks()
    return KeyRows.complete(
        plan.row_schema, keys_in(plan, table), shaped(plan, table), has_runs=not plan.is_whole_key
    )


def read_columns(plan: LookupPlan) -> list[str]:
    """Return the columns to read: the key columns and the looked-up columns."""
    names = list(plan.key_schema.names)
    return [*names, *(name for name in plan.columns if name not in names)]


def keys_in(plan: LookupPlan, rows: pa.Table) -> Keys:
    """Return the keys of the table's rows."""
    return Keys([_one_array(rows.column(f.name).cast(f.type)) for f in plan.key_schema])


def shaped(plan: LookupPlan, rows: pa.Table) -> pa.RecordBatch:
    """Return the looked-up columns of the table's rows in the types of the plan."""
    arrays = []
    for name, field in zip(plan.columns, plan.row_schema, strict=True):
        column = _one_array(rows.column(name))
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except pa.ArrowException as error:
                raise SchemaMismatchError(
                    f"table '{plan.table}': column '{name}' is {type_name(column.type)} now, and"
                    f" was {type_name(field.type)} when the lookup was made; make the lookup again"
                ) from error
        arrays.append(column)
    return pa.RecordBatch.from_arrays(arrays, schema=plan.row_schema)


def _form_of(plan: LookupPlan) -> list[str]:
    """Return the parts of a plan on which the rows of a cut depend."""
    schemas = (plan.key_schema, plan.row_schema)
    forms = [schema.serialize().to_pybytes().hex() for schema in schemas]
    return [*forms, *plan.columns, str(plan.is_whole_key)]


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    joined = column.combine_chunks()
    return joined.combine_chunks() if isinstance(joined, pa.ChunkedArray) else joined
