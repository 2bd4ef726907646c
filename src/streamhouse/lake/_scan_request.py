"""The request for a plan of a scan, checked: snapshots, columns and condition.

The form is `PlanTableScanRequest` of the Iceberg REST protocol. A part of a condition that cannot
be judged here leaves the condition out of the planning, and the engine applies it to the rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Context, Decimal, InvalidOperation
from typing import Any, Final

from pyiceberg.expressions import (
    AlwaysFalse,
    AlwaysTrue,
    And,
    BooleanExpression,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNaN,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    NotEqualTo,
    NotIn,
    NotNaN,
    NotNull,
    NotStartsWith,
    Or,
    Reference,
    StartsWith,
)
from pyiceberg.expressions.literals import (
    Literal,
    literal,
)
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot, is_parent_ancestor_of
from pyiceberg.types import (
    BinaryType,
    DecimalType,
    FixedType,
    IcebergType,
    NestedField,
    PrimitiveType,
)

from streamhouse.core.errors import InvalidRequestError, SnapshotNotFoundError

__all__ = ["ScanRequest"]

_VALUES_MAX: Final = 10_000
_DEPTH_MAX: Final = 100
_FILTER_BYTES_MAX: Final = 1 << 20
# pyiceberg judges each file by each part of a condition.
_JUDGED_PARTS_MAX: Final = 1_000

_UNARY: Final[dict[str, Callable[..., BooleanExpression]]] = {
    "is-null": IsNull,
    "not-null": NotNull,
    "is-nan": IsNaN,
    "not-nan": NotNaN,
}
_COMPARISONS: Final[dict[str, Callable[..., BooleanExpression]]] = {
    "lt": LessThan,
    "lt-eq": LessThanOrEqual,
    "gt": GreaterThan,
    "gt-eq": GreaterThanOrEqual,
    "eq": EqualTo,
    "not-eq": NotEqualTo,
    "starts-with": StartsWith,
    "not-starts-with": NotStartsWith,
}
_SETS: Final[dict[str, Callable[..., BooleanExpression]]] = {"in": In, "not-in": NotIn}


# Python's own context keeps 28 digits, Iceberg's decimals have up to 38.
_EXACT: Final = Context(prec=100)


class _NotJudgedError(Exception):
    """A valid part of a condition that pyiceberg cannot judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanRequest:
    """A checked request on one table.

    `snapshot` is None for a table without rows. With `start_snapshot_id` the scan is of the rows
    appended after that snapshot. `condition` chooses the files, and `residual` is the condition as
    the request has it, of `parts` parts and `residual_bytes` in JSON. `stats` are the columns whose
    statistics are in the answer.
    """

    snapshot: Snapshot | None
    start_snapshot_id: int | None
    condition: BooleanExpression
    residual: Any
    residual_bytes: int
    parts: int
    stats: frozenset[int]

    @classmethod
    def of(cls, name: str, metadata: TableMetadata, request: Mapping[str, Any]) -> ScanRequest:
        """Return the request for a scan of the table `name`.

        Raises:
            InvalidRequestError: the request is malformed, or names an unknown column.
            SnapshotNotFoundError: the table has no such snapshot.
        """
        _check_fields(request)
        residual = request.get("filter")
        residual_bytes, parts = _json_bytes(residual), _parts(residual)
        start_id = request.get("start-snapshot-id")
        snapshot = _snapshot(name, metadata, request)
        if start_id is not None and not (
            snapshot and is_parent_ancestor_of(snapshot.snapshot_id, start_id, metadata)
        ):
            raise InvalidRequestError(
                f"lake table '{name}': start-snapshot-id {start_id} is not an ancestor of"
                f" end-snapshot-id {request['end-snapshot-id']}"
            )
        columns = _columns(metadata, snapshot, request)
        for column in request.get("select") or ():
            columns.field(column)
        condition = _condition(residual, columns)
        return cls(
            snapshot=snapshot,
            start_snapshot_id=start_id,
            condition=condition if parts <= _JUDGED_PARTS_MAX else AlwaysTrue(),
            residual=residual,
            residual_bytes=residual_bytes,
            parts=parts,
            stats=frozenset(columns.field(c).field_id for c in request.get("stats-fields") or ()),
        )


def _check_fields(request: Mapping[str, Any]) -> None:
    kinds: tuple[tuple[str, type], ...] = (
        ("snapshot-id", int),
        ("start-snapshot-id", int),
        ("end-snapshot-id", int),
        ("min-rows-requested", int),
        ("case-sensitive", bool),
        ("use-snapshot-schema", bool),
        ("select", list),
        ("stats-fields", list),
    )
    for field, kind in kinds:
        value = request.get(field)
        if value is not None and (type(value) is not kind):
            raise InvalidRequestError(f"{field} must be of JSON type {_json_type(kind)}")
    for field in ("select", "stats-fields"):
        if not all(isinstance(name, str) for name in request.get(field) or ()):
            raise InvalidRequestError(f"{field} must be a list of column names")
    start, end = (request.get(f"{side}-snapshot-id") for side in ("start", "end"))
    if (start is None) != (end is None):
        raise InvalidRequestError(
            "an incremental scan needs both start-snapshot-id and end-snapshot-id"
        )
    if start is not None and request.get("snapshot-id") is not None:
        raise InvalidRequestError(
            "snapshot-id must not stand beside start-snapshot-id and end-snapshot-id"
        )


def _json_type(kind: type) -> str:
    return {int: "integer", bool: "boolean", list: "array"}[kind]


def _json_bytes(condition: Any) -> int:
    """Return the bytes of a condition in JSON; raises for a condition that no answer can repeat."""
    try:
        byte_count = len(json.dumps(condition, allow_nan=False))
    except ValueError as error:
        raise InvalidRequestError("filter: NaN and infinite numbers are not in JSON") from error
    if byte_count > _FILTER_BYTES_MAX:
        raise InvalidRequestError(
            f"filter takes {byte_count} bytes, and a plan at most {_FILTER_BYTES_MAX}"
        )
    return byte_count


def _parts(condition: Any) -> int:
    """Return how many expressions a condition has."""
    remaining, count = [condition], 0
    while remaining:
        value = remaining.pop()
        if isinstance(value, dict):
            count += 1
            remaining += [value.get(side) for side in ("left", "right", "child")]
    return count


def _snapshot(name: str, metadata: TableMetadata, request: Mapping[str, Any]) -> Snapshot | None:
    snapshot_id = request.get("snapshot-id")
    if snapshot_id is None:
        snapshot_id = request.get("end-snapshot-id")
    if snapshot_id is None:
        return metadata.current_snapshot()
    snapshot = metadata.snapshot_by_id(snapshot_id)
    if snapshot is None:
        raise SnapshotNotFoundError(f"lake table '{name}' has no snapshot {snapshot_id}")
    return snapshot


def _columns(
    metadata: TableMetadata, snapshot: Snapshot | None, request: Mapping[str, Any]
) -> _Columns:
    current = metadata.schema()
    schema_id = current.schema_id if snapshot is None else snapshot.schema_id
    of_snapshot = next((s for s in metadata.schemas if s.schema_id == schema_id), current)
    # pyiceberg 0.12 selects columns by the names of the snapshot, and does not say so.
    schemas = (current, of_snapshot)
    return _Columns(
        schemas[::-1] if request.get("use-snapshot-schema") else schemas,
        current,
        is_exact=request.get("case-sensitive") is not False,
    )


class _Columns:
    """The columns that a request names by the first of `schemas` with the name.

    Planning names them by `current`.
    """

    def __init__(self, schemas: Sequence[Schema], current: Schema, *, is_exact: bool) -> None:
        self._schemas = schemas
        self._current = current
        self._is_exact = is_exact

    def field(self, name: Any) -> NestedField:
        """Return the column; raises `InvalidRequestError` for an unknown name."""
        if isinstance(name, str):
            for schema in self._schemas:
                with suppress(ValueError):
                    return schema.find_field(name, case_sensitive=self._is_exact)
        raise InvalidRequestError(f"column '{str(name)[:200]}' does not exist")

    def reference(self, field: NestedField) -> Reference:
        """Return the name for planning; `_NotJudgedError` for a column dropped or in a list."""
        name = self._current.find_column_name(field.field_id)
        if name is None or not isinstance(field.field_type, PrimitiveType):
            raise _NotJudgedError
        try:
            self._current.accessor_for_field(field.field_id)
        except ValueError as error:
            raise _NotJudgedError from error
        return Reference(name)


def _condition(value: Any, columns: _Columns) -> BooleanExpression:
    if value is None:
        return AlwaysTrue()
    try:
        return _parsed(value, columns, depth=0)
    except _NotJudgedError:
        return AlwaysTrue()


def _parsed(value: Any, columns: _Columns, *, depth: int) -> BooleanExpression:
    if depth > _DEPTH_MAX:
        raise InvalidRequestError(f"filter is nested deeper than {_DEPTH_MAX} levels")
    if isinstance(value, bool):
        return AlwaysTrue() if value else AlwaysFalse()
    if not isinstance(value, dict):
        raise InvalidRequestError("filter: an expression must be an object, true or false")
    kind = value.get("type")
    if kind in ("true", "false"):
        return AlwaysTrue() if kind == "true" else AlwaysFalse()
    if kind in ("and", "or"):
        sides = [_parsed(value.get(side), columns, depth=depth + 1) for side in ("left", "right")]
        return And(*sides) if kind == "and" else Or(*sides)
    if kind == "not":
        return Not(_parsed(value.get("child"), columns, depth=depth + 1))
    if not isinstance(kind, str) or kind not in {*_UNARY, *_COMPARISONS, *_SETS}:
        raise InvalidRequestError(f"filter: unknown expression type '{str(kind)[:50]}'")
    return _predicate(kind, value, columns)


def _predicate(kind: str, value: Mapping[str, Any], columns: _Columns) -> BooleanExpression:
    term = value.get("term")
    if isinstance(term, dict):
        if term.get("type") == "transform":
            columns.field(_name_of(term.get("term")))
            raise _NotJudgedError
        term = _name_of(term)
    field = columns.field(term)
    reference = columns.reference(field)
    if kind in _UNARY:
        return _UNARY[kind](reference)
    if kind in _SETS:
        values = value.get("values")
        if not isinstance(values, list) or len(values) > _VALUES_MAX:
            raise InvalidRequestError(f"filter: values must be a list of at most {_VALUES_MAX}")
        literals = {_literal(each, field) for each in values}
        return _SETS[kind](reference, literals)
    if "starts" in kind and str(field.field_type) != "string":
        raise InvalidRequestError(f"filter: {kind} needs a string, not column '{field.name}'")
    return _COMPARISONS[kind](reference, _literal(value.get("value"), field))


def _name_of(term: Any) -> Any:
    """Return the column of a reference, which may be an object in newer clients."""
    if isinstance(term, dict) and term.get("type") == "reference":
        return term.get("term")
    return term


def _literal(value: Any, field: NestedField) -> Literal[Any]:
    """Return a value in the JSON form of the column's type (Iceberg spec, appendix D).

    Raises `InvalidRequestError` for a value of another form, `_NotJudgedError` for a nested column.
    """
    kind = field.field_type
    if isinstance(value, dict) and "value" in value:
        value = value["value"]
    try:
        return _literal_of(value, kind)
    except (ValueError, TypeError, InvalidOperation, OverflowError) as error:
        raise InvalidRequestError(
            f"filter: {str(value)[:100]!r} is not a value of column '{field.name}' ({kind})"
        ) from error


def _literal_of(value: Any, kind: IcebergType) -> Literal[Any]:
    if not isinstance(kind, PrimitiveType):
        raise _NotJudgedError
    if isinstance(kind, FixedType | BinaryType):
        return literal(bytes.fromhex(value)).to(kind)
    if isinstance(kind, DecimalType):
        exact = Decimal(value)
        scaled = exact.quantize(Decimal(1).scaleb(-kind.scale), context=_EXACT)
        if scaled != exact:
            raise _NotJudgedError
        return literal(scaled).to(kind)
    if type(value) not in (bool, int, float, str):
        raise TypeError
    # pyiceberg sends texts of numbers, and numbers of days and microseconds.
    converted: Literal[Any] = literal(value).to(kind)
    # As pyiceberg does once more: a number beyond the type stays one for columns of numbers only.
    return converted.to(kind)
