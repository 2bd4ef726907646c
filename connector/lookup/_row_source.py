"""Getting rows by key from the service: the rows of the requested keys, or the whole table.

A key costs the service about a microsecond, a row of a full read a tenth of a microsecond. So once
a task has asked for a good part of the table, the task reads one cut of the table instead, if the
table fits in memory. If the read fails, the task goes on with single keys.
"""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from streamhouse.client import StorageClient
from streamhouse.connector.lookup._key_rows import KeyRows, Keys, Numbers
from streamhouse.connector.lookup._lookup_plan import LookupPlan
from streamhouse.connector.lookup._shared_tables import SharedTables
from streamhouse.connector.lookup._table_cut import CutOfTable, PlannedTable
from streamhouse.connector.lookup._whole_rows import (
    SharedCut,
    keys_in,
    read_columns,
    shaped,
    whole_rows,
)
from streamhouse.core.errors import RequestTooLargeError, StreamhouseError
from streamhouse.core.model.schema import FOUND_COLUMN, empty_batch

__all__ = ["KeyedRows", "RowSource"]

_log = logging.getLogger(__name__)

_KEY_COUNT_MIN: Final = 20_000
"""However small a table is, reading it takes as long as this many keys."""
_KEY_SHARE: Final = 16
"""The table is read after requests for one key in this many rows."""
_CHANGES_MAX: Final = 4
"""A table with more changes a row outside the lake is not read."""
_KEY_BYTES: Final = 64
# Rows requested of each prefix, and prefixes in a request: the service answers at most 100,000
# rows (`lookup_rows_max`). A prefix that may have more rows goes to the next step.
_STEPS: Final = ((100, 1_000), (10_000, 10), (100_000, 1))


class KeyedRows(NamedTuple):
    """Keys, the number of rows of each key, and the rows, key after key."""

    keys: Keys
    counts: Numbers
    rows: pa.RecordBatch


class RowSource:
    """Answers a task's requests for keys, call after call."""

    def __init__(
        self,
        plan: LookupPlan,
        client: StorageClient,
        table: PlannedTable,
        *,
        shared: SharedTables | None = None,
        key_count_min: int = _KEY_COUNT_MIN,
    ) -> None:
        self._shared = shared
        self._key_count_min = key_count_min
        self._plan = plan
        self._client = client
        self._table = table
        self._key_count = 0
        self._row_bytes = 0.0
        self._may_read_all = True

    @property
    def shares(self) -> bool:
        """Whether other tasks use the same full read."""
        return self._shared is not None

    def answer(self, keys: Keys) -> KeyedRows | KeyRows:
        """Return the rows of distinct keys, or all rows of the table."""
        self._key_count += len(keys)
        if self._may_read_all and self._key_count > self._key_count_min:
            cut = self._cut_if_cheaper()
            everything = None if cut is None else self._read_all(cut)
            if everything is not None:
                return everything
        rows = self._rows_of(keys) if self._plan.is_whole_key else self._rows_under(keys)
        if rows.rows.num_rows:
            self._row_bytes = max(self._row_bytes, rows.rows.nbytes / rows.rows.num_rows)
        return rows

    # -- by key --------------------------------------------------------------------------------

    def _rows_of(self, keys: Keys) -> KeyedRows:
        plan = self._plan
        answer = self._client.lookup(plan.table, self._as_table(keys), columns=list(plan.columns))
        is_present = answer.column(FOUND_COLUMN)
        rows = shaped(plan, answer.filter(is_present))
        counts = np.asarray(is_present.to_numpy()).astype(np.int64)
        return KeyedRows(keys, counts, rows)

    def _rows_under(self, prefixes: Keys) -> KeyedRows:
        parts: list[KeyedRows] = []
        for limit, at_once in _STEPS:
            larger = []
            for start in range(0, len(prefixes), at_once):
                part = prefixes.at(np.arange(start, min(start + at_once, len(prefixes))))
                rows_of_part, unfinished = self._some_under(part, limit)
                parts.append(rows_of_part)
                larger.append(start + unfinished)
            prefixes = prefixes.at(np.concatenate(larger) if larger else np.zeros(0, np.int64))
            if not len(prefixes):
                break
        else:
            values = ", ".join(
                f"{name} = {array[0]}"
                for name, array in zip(self._plan.key_schema.names, prefixes.arrays, strict=True)
            )
            raise RequestTooLargeError(
                f"table '{self._plan.table}': at least {limit:,} rows have {values}, more than one"
                " lookup answers; join with"
                f" spark.read.format('streamhouse').load('{self._plan.table}') instead"
            )
        arrays = [
            pa.concat_arrays([part.keys.arrays[i] for part in parts])
            for i in range(len(self._plan.key_schema))
        ]
        rows = pa.concat_batches([part.rows for part in parts])
        return KeyedRows(Keys(arrays), np.concatenate([part.counts for part in parts]), rows)

    def _some_under(self, prefixes: Keys, limit: int) -> tuple[KeyedRows, Numbers]:
        """Return the rows of prefixes with less than `limit` rows, and the larger ones'
        positions.
        """
        plan = self._plan
        columns = read_columns(plan)
        answer = self._client.prefix_lookup(
            plan.table, self._as_table(prefixes), limit=limit, columns=columns
        ).combine_chunks()
        prefix_index = KeyRows(pa.schema([]), has_runs=False)
        single_rows = np.ones(len(prefixes), dtype=np.int64)
        prefix_index.add(prefixes, single_rows, empty_batch(pa.schema([])))
        numbers = prefix_index.find(keys_in(plan, answer)) - 1
        counts = np.bincount(numbers, minlength=len(prefixes))
        is_whole = counts < limit
        rows = shaped(plan, answer)
        if not is_whole.all():
            rows = rows.filter(pa.array(is_whole[numbers]))
        chosen = prefixes.at(np.flatnonzero(is_whole))
        return KeyedRows(chosen, counts[is_whole], rows), np.flatnonzero(~is_whole)

    # -- the whole table -----------------------------------------------------------------------

    def _cut_if_cheaper(self) -> CutOfTable | None:
        """Return the cut of the table if a full read fits and costs less than more single keys."""
        row_count = self._client.count(self._plan.table)
        size = row_count * (self._row_bytes + _KEY_BYTES)
        if self._key_count * _KEY_SHARE < row_count:
            return None
        if size > self._plan.cache_bytes:
            self._may_read_all = False
            return None
        cut = self._table.cut()
        return cut if cut.changes <= max(_CHANGES_MAX * row_count, self._key_count_min) else None

    def _read_all(self, cut: CutOfTable) -> KeyRows | None:
        plan = self._plan
        try:
            name = cut.name
            if self._shared is None or name is None:
                everything = whole_rows(plan, cut)
            else:
                everything = self._shared.load_once(SharedCut(plan, cut, name))
        except (StreamhouseError, OSError, ImportError, pa.ArrowException) as error:
            self._may_read_all = False
            _log.warning(
                "table=%s is not read as a whole, its rows are looked up: %s", plan.table, error
            )
            return None
        # When the cache is too old, a new full read needs as many requested keys again.
        self._key_count = 0
        self._may_read_all = everything.nbytes <= plan.cache_bytes
        return everything

    def _as_table(self, keys: Keys) -> pa.Table:
        return pa.table(list(keys.arrays), schema=self._plan.key_schema)
