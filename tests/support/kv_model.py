"""The obvious primary key table: a dict of rows, one change at a time. What `kv` must equal."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from streamhouse.core.model.changelog import (
    DELETE,
    INSERT,
    UPDATE_AFTER,
    UPDATE_BEFORE,
)
from streamhouse.core.model.merge_engine import (
    Aggregate,
    ChangelogImage,
    ColumnAggregate,
    DeleteBehavior,
    MergeEngine,
    MergeRules,
)
from streamhouse.core.model.schema import Schema

__all__ = ["Change", "Entry", "KvModel", "identity"]

Row = dict[str, Any]
Change = tuple[Literal["upsert", "delete"], Row]


@dataclass(frozen=True)
class Entry:
    """One line of the changelog."""

    offset: int
    change_type: int
    retracts: int | None
    row: Row


@dataclass
class KvModel:
    """`rows` is by key: the offset of the version, and the row.

    Where it `renews_unchanged`, an upsert that changes nothing makes a new version all the same.
    """

    schema: Schema
    primary_key: tuple[str, ...]
    merge: MergeRules
    rows: dict[Any, tuple[int, Row]] = field(default_factory=dict)
    log: list[Entry] = field(default_factory=list)
    renews_unchanged: bool = False

    def key(self, row: Mapping[str, Any]) -> Any:
        return tuple(row[name] for name in self.primary_key)

    def apply(self, changes: Sequence[Change], columns: Sequence[str] | None = None) -> list[Entry]:
        """Apply changes one by one; return what they add to the changelog."""
        start = len(self.log)
        for operation, row in changes:
            if operation == "upsert":
                self._upsert(row, columns or self.schema.names)
            elif self.merge.delete_behavior is DeleteBehavior.ALLOW:
                self._delete(row)
        return self.log[start:]

    def _emit(self, change_type: int, retracts: int | None, row: Row) -> int:
        self.log.append(Entry(len(self.log), change_type, retracts, row))
        return len(self.log) - 1

    def _delete(self, row: Row) -> None:
        stored = self.rows.pop(self.key(row), None)
        if stored is not None:
            self._emit(DELETE, *stored)

    def _upsert(self, row: Row, columns: Sequence[str]) -> None:
        key = self.key(row)
        stored = self.rows.get(key)
        version, old = stored or (None, None)
        new = self._merged(old, row, columns)
        if new is None:
            return
        if not self.renews_unchanged and old is not None and identity(old) == identity(new):
            return
        if version is None:
            self.rows[key] = (self._emit(INSERT, None, new), new)
            return
        assert old is not None
        if self.merge.image is ChangelogImage.FULL:
            self._emit(UPDATE_BEFORE, None, old)
        self.rows[key] = (self._emit(UPDATE_AFTER, version, new), new)

    def _merged(self, old: Row | None, row: Row, columns: Sequence[str]) -> Row | None:
        if old is not None and self.merge.engine is MergeEngine.FIRST_ROW:
            return None
        if old is not None and self.merge.engine is MergeEngine.VERSIONED:
            name = self.merge.version_column
            assert name is not None
            if row[name] < old[name]:
                return None
        new: Row = {}
        for column in self.schema.columns:
            name = column.name
            aggregate = self.merge.aggregates.get(name)
            if aggregate is not None:
                given = row[name] if name in columns else _UNNAMED
                new[name] = _aggregated(aggregate, old, name, given, column.type)
            elif name in columns:
                new[name] = row[name]
            else:
                new[name] = old[name] if old is not None else None
        return new


_UNNAMED = object()


def _aggregated(
    aggregate: ColumnAggregate, old: Row | None, name: str, given: Any, data_type: pa.DataType
) -> Any:
    function = aggregate.function
    state = None if old is None else old[name]
    if function is Aggregate.COUNT:
        return (state or 0) + (given is not None)
    if given is _UNNAMED:
        return state
    if function is Aggregate.LAST_VALUE:
        return given
    if function is Aggregate.FIRST_VALUE:
        return given if old is None else state
    if given is None or state is None:
        return state if given is None else given
    return _combined(aggregate, state, given, data_type)


def _combined(aggregate: ColumnAggregate, state: Any, given: Any, data_type: pa.DataType) -> Any:
    match aggregate.function:
        case Aggregate.LAST_NON_NULL:
            return given
        case Aggregate.SUM:
            if data_type == pa.float32():
                return float(np.float32(state) + np.float32(given))
            return state + given
        case Aggregate.MIN:
            return given if _beats(given, state, -1) else state
        case Aggregate.MAX:
            return given if _beats(given, state, 1) else state
        case Aggregate.BOOL_AND:
            return state and given
        case Aggregate.BOOL_OR:
            return state or given
    assert aggregate.function is Aggregate.LISTAGG
    return state + aggregate.delimiter + given


def _beats(given: Any, state: Any, sign: int) -> bool:
    """Whether `given` is greater (sign 1) or less (-1) than `state`; NaN is greater than all."""
    if isinstance(given, float) and (math.isnan(given) or math.isnan(state)):
        newer, older = (given, state) if sign > 0 else (state, given)
        return math.isnan(newer) and not math.isnan(older)
    return bool(given > state if sign > 0 else given < state)


def identity(value: Any) -> Any:
    """Return something equal exactly for identical values: NaN is itself, 0.0 is not -0.0."""
    if isinstance(value, float):
        return ("float", struct.pack("<d", math.nan if math.isnan(value) else value))
    if isinstance(value, Mapping):
        return ("row", tuple((name, identity(item)) for name, item in sorted(value.items())))
    if isinstance(value, list | tuple):
        return ("list", tuple(identity(item) for item in value))
    return (type(value).__name__, value)
