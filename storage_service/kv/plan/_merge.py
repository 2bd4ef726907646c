"""Merging rows with earlier rows of the same key: one function for each merge engine.

Pure and vectorised. Several rows of one key in a batch merge like single rows in several batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import SchemaMismatchError
from streamhouse.core.model.merge_engine import MergeEngine
from streamhouse.storage_service.kv.plan._aggregates import States, aggregate_column
from streamhouse.storage_service.kv.plan._key_chains import KeyChains
from streamhouse.storage_service.kv.plan.write_input import WriteInput
from streamhouse.storage_service.kv.rows._stored_rows import StoredRows
from streamhouse.storage_service.kv.table_rules import TableRules

__all__ = ["MergedRows", "merge_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedRows:
    """The result of every change, by place (see `KeyChains`).

    `rows.take(at)` is the row after each upsert. `accepted` marks the effective changes; other
    changes leave the row unchanged.
    """

    rows: pa.RecordBatch
    at: npt.NDArray[np.int64]
    accepted: npt.NDArray[np.bool_]


def merge_rows(
    writes: WriteInput, chains: KeyChains, stored: StoredRows, rules: TableRules
) -> MergedRows:
    """Apply the table's merge engine to every upsert; raises for an unmergeable row."""
    everything = np.ones(len(chains.row), dtype=np.bool_)
    match rules.merge.engine:
        case MergeEngine.FIRST_ROW:
            accepted = chains.first & ~stored.found[chains.chain]
            return MergedRows(rows=writes.rows, at=chains.row, accepted=accepted)
        case MergeEngine.VERSIONED:
            accepted = _newest_so_far(writes, chains, stored, rules)
            return MergedRows(rows=writes.rows, at=chains.row, accepted=accepted)
    if not writes.is_partial and not rules.merge.aggregates:
        return MergedRows(rows=writes.rows, at=chains.row, accepted=everything)
    rows = _merged_columns(writes, chains, stored, rules)
    return MergedRows(rows=rows, at=np.arange(len(chains.row)), accepted=everything)


def _newest_so_far(
    writes: WriteInput, chains: KeyChains, stored: StoredRows, rules: TableRules
) -> npt.NDArray[np.bool_]:
    """Mark the rows whose version is at least the version of the previous row."""
    assert rules.merge.version_column is not None
    name = rules.merge.version_column
    versions = writes.rows.column(name).take(pa.array(chains.row))
    slots = States.of(chains.first, stored.found)
    both = slots.slots(stored.rows.column(name), versions)
    numbers = both.cast(pa.int32()) if pa.types.is_date(both.type) else both
    numbers = numbers.cast(pa.int64())
    # Ranks leave room below for "no version"; chains are kept apart by rising offsets.
    ranks = pc.rank(numbers, tiebreaker="dense").to_numpy()
    ranks = np.where(numbers.is_valid(), ranks.astype(np.int64) + 1, 0)
    rise = slots.segments.index * np.int64(len(ranks) + 2)
    greatest = np.maximum.accumulate(ranks + rise) - rise
    row_rank = ranks[slots.row_slot]
    accepted: npt.NDArray[np.bool_] = (row_rank > 0) & (row_rank >= greatest[slots.row_slot - 1])
    return accepted


def _merged_columns(
    writes: WriteInput, chains: KeyChains, stored: StoredRows, rules: TableRules
) -> pa.RecordBatch:
    """Return the rows after each upsert, by place, merged column by column."""
    deleted = writes.deletes[chains.row]
    # A delete ends the earlier state: the next row starts without a state.
    starts = chains.first.copy()
    starts[1:] |= deleted[:-1]
    has_state = np.zeros(int(starts.sum()), dtype=np.bool_)
    has_state[np.flatnonzero(chains.first[starts])] = stored.found
    slots = States.of(starts, has_state)
    kept_state = _kept_state(chains, stored, starts)
    places = pa.array(chains.row)
    # Values of a delete outside the key must not be aggregated.
    upserted = pa.array(chains.row, mask=deleted)
    columns = []
    for field in rules.schema.to_arrow():
        values = writes.rows.column(field.name)
        aggregate = rules.merge.aggregates.get(field.name)
        where = f"table '{rules.table}', column '{field.name}'"
        if field.name not in writes.named and _counts(rules, field.name):
            values = pa.repeat(1, len(values)).cast(field.type)
        elif field.name not in writes.named:
            column = stored.rows.column(field.name).take(kept_state)
            _check_kept(column, field, writes, chains, deleted, where=where)
            columns.append(column)
            continue
        if aggregate is None:
            column = values.take(places)
        else:
            column = aggregate_column(
                stored.rows.column(field.name),
                values.take(upserted),
                slots,
                aggregate,
                row_number=lambda place: int(writes.row_numbers[chains.row[place]]),
                where=where,
            )
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=rules.schema.to_arrow())


def _counts(rules: TableRules, name: str) -> bool:
    """Whether the column counts; an update without the column counts as a value."""
    aggregate = rules.merge.aggregates.get(name)
    return aggregate is not None and aggregate.function == "count"


def _kept_state(chains: KeyChains, stored: StoredRows, starts: npt.NDArray[np.bool_]) -> pa.Array:
    """Return, by place, the stored row providing an unnamed column's value; null if none."""
    deleted_before = chains.latest(starts & ~chains.first) >= 0
    none = deleted_before | ~stored.found[chains.chain]
    return pa.array(np.where(none, 0, stored.place[chains.chain]), mask=none)


def _check_kept(
    column: pa.Array,
    field: pa.Field,
    writes: WriteInput,
    chains: KeyChains,
    deleted: npt.NDArray[np.bool_],
    *,
    where: str,
) -> None:
    if field.nullable or column.null_count == 0:
        return
    missing = column.is_null().to_numpy(zero_copy_only=False) & ~deleted
    if missing.any():
        row = int(writes.row_numbers[chains.row[missing]].min())
        raise SchemaMismatchError(
            f"{where} must not be null, but row {row} is a new row and the update does not name it"
        )
