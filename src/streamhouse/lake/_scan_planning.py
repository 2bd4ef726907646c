"""Scan planning by the service: the files of a table that a condition needs, as JSON.

The request and the answer are those of the Iceberg REST protocol (`PlanTableScanRequest`,
`CompletedPlanningResult`); pyiceberg finds the files. Every answer is complete: no plan is kept.

Invariant: an answer has every file with a row for the condition. A part of a condition that cannot
be judged here leaves the condition out of the planning, and the engine applies it to the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Context, Decimal, InvalidOperation
from typing import Any, Final

from pyiceberg.conversions import from_bytes, to_json
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
from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, DataFileContent
from pyiceberg.manifest import FileFormat as ManifestFormat
from pyiceberg.schema import Schema
from pyiceberg.table import DataScan, FileScanTask
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.types import (
    BinaryType,
    DecimalType,
    FixedType,
    IcebergType,
    NestedField,
    PrimitiveType,
)

from streamhouse.core.errors import InvalidRequestError, SnapshotNotFoundError, UnsupportedError
from streamhouse.lake.iceberg_errors import lake_errors

__all__ = ["planned_scan"]

FILES_MAX: Final = 50_000
_VALUES_MAX: Final = 10_000
_DEPTH_MAX: Final = 100

_CONTENTS: Final = {
    DataFileContent.DATA: "data",
    DataFileContent.POSITION_DELETES: "position-deletes",
    DataFileContent.EQUALITY_DELETES: "equality-deletes",
}
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


def planned_scan(
    name: str, metadata: TableMetadata, io: FileIO, request: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the completed plan of a scan of the table `name`, in the protocol's form.

    Raises:
        InvalidRequestError: the request is malformed, or names an unknown column.
        SnapshotNotFoundError: the table has no such snapshot.
        UnsupportedError: an incremental scan, more than 50,000 files, or equality deletes.
    """
    _check_fields(request)
    snapshot_id = request.get("snapshot-id")
    snapshot = metadata.current_snapshot()
    if snapshot_id is not None:
        snapshot = metadata.snapshot_by_id(snapshot_id)
        if snapshot is None:
            raise SnapshotNotFoundError(f"lake table '{name}' has no snapshot {snapshot_id}")
    columns = _columns(metadata, snapshot, request)
    for column in request.get("select") or ():
        columns.field(column)
    stats = {columns.field(column).field_id for column in request.get("stats-fields") or ()}
    condition = _condition(request.get("filter"), columns)
    if snapshot is None:
        return {"status": "completed", "file-scan-tasks": [], "delete-files": []}
    with lake_errors(f"plan a scan of lake table '{name}'"):
        scan = DataScan(
            table_metadata=metadata,
            io=io,
            row_filter=condition,
            snapshot_id=snapshot.snapshot_id,
        )
        try:
            tasks = list(scan.plan_files())
        except ValueError as error:
            if "equality delete" in str(error):
                raise UnsupportedError(
                    f"lake table '{name}' has equality deletes, with which the service plans no"
                    " scans: plan locally"
                ) from error
            raise
        return _answer(name, metadata, tasks, request.get("filter"), stats)


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
    if request.get("start-snapshot-id") is not None or request.get("end-snapshot-id") is not None:
        raise UnsupportedError("incremental scans are not planned by the service: plan locally")


def _json_type(kind: type) -> str:
    return {int: "integer", bool: "boolean", list: "array"}[kind]


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
    return converted


def _answer(
    name: str,
    metadata: TableMetadata,
    tasks: Sequence[FileScanTask],
    condition: Any,
    stats: set[int],
) -> dict[str, Any]:
    if len(tasks) > FILES_MAX:
        raise UnsupportedError(
            f"the scan of lake table '{name}' needs {len(tasks)} files, and the service answers at"
            f" most {FILES_MAX}: plan locally, or ask for fewer rows"
        )
    types = {field.field_id: field.field_type for s in metadata.schemas for field in _fields(s)}
    deletes: dict[str, int] = {}
    delete_files: list[dict[str, Any]] = []
    answered = []
    for task in tasks:
        references = []
        for file in sorted(task.delete_files, key=lambda file: file.file_path):
            if file.file_format is ManifestFormat.PUFFIN:
                raise UnsupportedError(
                    f"lake table '{name}' has deletion vectors, with which the service plans no"
                    " scans: plan locally"
                )
            if file.file_path not in deletes:
                deletes[file.file_path] = len(delete_files)
                delete_files.append(_content_file(file, metadata, types, set()))
            references.append(deletes[file.file_path])
        plan: dict[str, Any] = {"data-file": _content_file(task.file, metadata, types, stats)}
        if references:
            plan["delete-file-references"] = references
        if condition is not None:
            plan["residual-filter"] = condition
        answered.append(plan)
    return {"status": "completed", "file-scan-tasks": answered, "delete-files": delete_files}


def _fields(schema: Schema) -> Iterable[NestedField]:
    return (schema.find_field(field_id) for field_id in schema.field_ids)


def _content_file(
    file: DataFile, metadata: TableMetadata, types: Mapping[int, IcebergType], stats: set[int]
) -> dict[str, Any]:
    spec = metadata.specs()[file.spec_id]
    partition = [
        _json_value(field.transform.result_type(types[field.source_id]), file.partition[position])
        for position, field in enumerate(spec.fields)
    ]
    value: dict[str, Any] = {
        "content": _CONTENTS[file.content],
        "spec-id": file.spec_id,
        "partition": partition,
        "file-path": file.file_path,
        "file-format": file.file_format.value.lower(),
        "file-size-in-bytes": file.file_size_in_bytes,
        "record-count": file.record_count,
    }
    if file.split_offsets:
        value["split-offsets"] = list(file.split_offsets)
    if file.sort_order_id is not None:
        value["sort-order-id"] = file.sort_order_id
    for key, counts in (
        ("column-sizes", file.column_sizes),
        ("value-counts", file.value_counts),
        ("null-value-counts", file.null_value_counts),
        ("nan-value-counts", file.nan_value_counts),
    ):
        value |= _map(key, {i: n for i, n in (counts or {}).items() if i in stats})
    for key, bounds in (("lower-bounds", file.lower_bounds), ("upper-bounds", file.upper_bounds)):
        shown = {
            i: to_json(kind, bound)
            for i, data in (bounds or {}).items()
            if i in stats and isinstance(kind := types.get(i), PrimitiveType)
            # JSON has no infinite numbers; a file may lack a bound.
            if _is_in_json(bound := from_bytes(kind, data))
        }
        value |= _map(key, shown)
    return value


def _map(key: str, values: Mapping[int, Any]) -> dict[str, Any]:
    return {key: {"keys": list(values), "values": list(values.values())}} if values else {}


def _json_value(kind: IcebergType, value: Any) -> Any:
    if value is None or not isinstance(kind, PrimitiveType):
        return None
    if not _is_in_json(value):
        raise UnsupportedError(
            "a partition of an infinite number or NaN is not in JSON: plan locally"
        )
    return to_json(kind, value)


def _is_in_json(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
