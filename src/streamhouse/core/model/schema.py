"""Table schemas: named, typed, numbered columns, their JSON form and their Arrow form.

Invariants:
- a column's `id` never changes and is never reused; the `id` is also the Iceberg field id
- the Arrow form is canonical: `string` (never `large_string`), `timestamp[us, UTC]`, ...
The types are the types shared by Spark and Iceberg format v2 (architecture, section 3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from streamhouse.core.errors import (
    InvalidNameError,
    InvalidSchemaError,
    UnknownColumnError,
    listing,
    suggestion,
)
from streamhouse.core.model.values.column_clauses import refused_clause

__all__ = [
    "RESERVED_COLUMNS",
    "Column",
    "Schema",
    "canonical_type",
    "check_name_text",
    "check_new_schema",
    "empty_batch",
    "type_from_json",
    "type_name",
    "type_to_json",
]

BUCKET_COLUMN: Final = "__bucket"
OFFSET_COLUMN: Final = "__offset"
TIMESTAMP_COLUMN: Final = "__timestamp"
CHANGE_TYPE_COLUMN: Final = "__change_type"
RETRACTS_COLUMN: Final = "__retracts"
FOUND_COLUMN: Final = "__found"
SPARK_CHANGE_TYPE_COLUMN: Final = "_change_type"
COMMIT_VERSION_COLUMN: Final = "_commit_version"
COMMIT_TIMESTAMP_COLUMN: Final = "_commit_timestamp"
SPARK_CHANGE_COLUMNS: Final = (
    SPARK_CHANGE_TYPE_COLUMN,
    COMMIT_VERSION_COLUMN,
    COMMIT_TIMESTAMP_COLUMN,
)
"""The columns of changes in Spark's form, which a table may have itself."""
RESERVED_COLUMNS: Final = (
    BUCKET_COLUMN,
    OFFSET_COLUMN,
    TIMESTAMP_COLUMN,
    CHANGE_TYPE_COLUMN,
    RETRACTS_COLUMN,
    FOUND_COLUMN,
)
COLUMN_NAME_CHARACTERS_MAX: Final = 255
COLUMNS_MAX: Final = 2_000
# Limits for new types and comments: every description of a table repeats them for each schema
# version, and every reader walks them. Existing tables keep larger types and comments.
TYPE_DEPTH_MAX: Final = 32
"""Levels of a nested type; a map is two. The limits of Parquet and Arrow readers are close."""
NESTED_FIELDS_MAX: Final = 10_000
COMMENT_CHARACTERS_MAX: Final = 4_000
COMMENTS_CHARACTERS_MAX: Final = 400_000
# Deeper than any reader of rows goes; the limit ends a recursion over a type.
_DEPTH_LIMIT: Final = 100

_SIMPLE_TYPES: Final[dict[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_NAMES_ELSEWHERE: Final = {
    "bool": "boolean",
    **dict.fromkeys(("int8", "byte"), "tinyint"),
    **dict.fromkeys(("int16", "short"), "smallint"),
    **dict.fromkeys(("int32", "integer"), "int"),
    **dict.fromkeys(("int64", "long"), "bigint"),
    **dict.fromkeys(("float32", "real"), "float"),
    **dict.fromkeys(("float64", "doubleprecision"), "double"),
    **dict.fromkeys(("text", "str", "utf8", "varchar", "char", "uuid", "json"), "string"),
    **dict.fromkeys(("bytes", "bytea", "blob"), "binary"),
    **dict.fromkeys(("datetime", "timestamptz", "timestamp_ltz"), "timestamp"),
    **dict.fromkeys(("list", "vector"), "array<T>"),
    **dict.fromkeys(("dict", "object"), "map<K,V>"),
    **dict.fromkeys(("row", "record", "tuple"), "struct<name: T>"),
    **dict.fromkeys(("numeric", "number", "decimal"), "decimal(10,2)"),
}
_SIMPLE_NAMES: Final = {arrow: name for name, arrow in _SIMPLE_TYPES.items()}
_UTC_NAMES: Final = frozenset({"UTC", "utc", "Etc/UTC", "+00:00", "Z"})


def canonical_type(data_type: pa.DataType, *, where: str, depth: int = 0) -> pa.DataType:
    """Return the canonical Arrow form of `data_type`.

    Layout variants of one logical type (large, view, dictionary, fixed-size list) become the plain
    layout. Every other type raises `InvalidSchemaError`, which names `where` and a type to use.
    """
    t = data_type
    if t in _SIMPLE_NAMES:
        return t
    _check_depth(depth, where)
    depth += 1
    if pa.types.is_dictionary(t):
        return canonical_type(t.value_type, where=where, depth=depth)
    if pa.types.is_large_string(t) or pa.types.is_string_view(t):
        return pa.string()
    if (
        pa.types.is_large_binary(t)
        or pa.types.is_binary_view(t)
        or pa.types.is_fixed_size_binary(t)
    ):
        return pa.binary()
    if pa.types.is_decimal128(t) and 0 <= t.scale <= t.precision:
        return t
    if pa.types.is_timestamp(t) and t.unit == "us" and t.tz in _UTC_NAMES:
        return _SIMPLE_TYPES["timestamp"]
    if pa.types.is_list(t) or pa.types.is_large_list(t) or pa.types.is_fixed_size_list(t):
        element = t.value_field
        inner = canonical_type(element.type, where=f"{where}.element", depth=depth)
        return pa.list_(pa.field("element", inner, nullable=element.nullable))
    if pa.types.is_struct(t):
        if t.num_fields == 0:
            raise InvalidSchemaError(f"column '{where}': an empty struct has no Iceberg form")
        _check_distinct([f.name for f in t], where=f"column '{where}': fields")
        return pa.struct(
            [
                pa.field(
                    f.name,
                    canonical_type(f.type, where=f"{where}.{f.name}", depth=depth),
                    f.nullable,
                )
                for f in t
            ]
        )
    if pa.types.is_map(t):
        key = canonical_type(t.key_type, where=f"{where}.key", depth=depth)
        item = canonical_type(t.item_type, where=f"{where}.value", depth=depth)
        return pa.map_(
            pa.field("key", key, nullable=False),
            pa.field("value", item, nullable=t.item_field.nullable),
        )
    raise InvalidSchemaError(f"column '{where}': type {t} is not supported; {_instead_of(t)}")


def _check_depth(depth: int, where: str) -> None:
    if depth > _DEPTH_LIMIT:
        raise InvalidSchemaError(f"column '{where[:80]}': the type is nested too deep")


def _instead_of(t: pa.DataType) -> str:
    if pa.types.is_unsigned_integer(t):
        wider = {8: "smallint (int16)", 16: "int (int32)", 32: "bigint (int64)"}
        return f"use {wider.get(t.bit_width, 'decimal(20,0)')}"
    if pa.types.is_float16(t):
        return "use float (float32)"
    if pa.types.is_timestamp(t):
        if t.tz is not None and t.tz not in _UTC_NAMES:
            return "convert it to timestamp[us, tz=UTC]"
        return "use microseconds: timestamp[us] or timestamp[us, tz=UTC]"
    if pa.types.is_time(t):
        return "store bigint microseconds or a string"
    if pa.types.is_duration(t) or pa.types.is_interval(t):
        return "store bigint microseconds"
    if pa.types.is_date64(t):
        return "use date (date32)"
    if pa.types.is_decimal(t):
        return "use decimal128 with precision up to 38 and a scale from 0 to the precision"
    if pa.types.is_null(t):
        return "give the column a type"
    return "use one of " + ", ".join([*_SIMPLE_TYPES, "decimal(p,s)", "array", "map", "struct"])


def type_to_json(t: pa.DataType) -> Any:
    """Return the JSON form of a canonical type: a name, or an object for nested types."""
    if t in _SIMPLE_NAMES:
        return _SIMPLE_NAMES[t]
    if pa.types.is_decimal(t):
        return f"decimal({t.precision},{t.scale})"
    if pa.types.is_list(t):
        return {
            "type": "array",
            "element": type_to_json(t.value_type),
            "element_nullable": t.value_field.nullable,
        }
    if pa.types.is_map(t):
        return {
            "type": "map",
            "key": type_to_json(t.key_type),
            "value": type_to_json(t.item_type),
            "value_nullable": t.item_field.nullable,
        }
    assert pa.types.is_struct(t), t
    fields = [{"name": f.name, "type": type_to_json(f.type), "nullable": f.nullable} for f in t]
    return {"type": "struct", "fields": fields}


def type_name(t: pa.DataType) -> str:
    """Return Spark's name of a type: `bigint`, `array<string>`; Arrow's name if Spark has none."""
    if pa.types.is_null(t):
        return "void"
    try:
        return _spark_name(canonical_type(t, where="type"))
    except InvalidSchemaError:
        return str(t)


def _spark_name(t: pa.DataType) -> str:
    if pa.types.is_list(t):
        return f"array<{_spark_name(t.value_type)}>"
    if pa.types.is_map(t):
        return f"map<{_spark_name(t.key_type)},{_spark_name(t.item_type)}>"
    if pa.types.is_struct(t):
        return f"struct<{','.join(f'{f.name}:{_spark_name(f.type)}' for f in t)}>"
    return str(type_to_json(t))


def type_from_json(value: Any, *, where: str, depth: int = 0) -> pa.DataType:
    """Read the JSON form of a type; raises `InvalidSchemaError` naming `where`."""
    if isinstance(value, str):
        name = value.replace(" ", "").lower()
        if name in _SIMPLE_TYPES:
            return _SIMPLE_TYPES[name]
        if name.startswith("decimal(") and name.endswith(")"):
            try:
                precision, scale = (int(part) for part in name[8:-1].split(","))
                return canonical_type(pa.decimal128(precision, scale), where=where)
            except (ValueError, OverflowError, pa.ArrowInvalid, InvalidSchemaError):
                raise InvalidSchemaError(
                    f"column '{where}': {value[:200]} is no type: a decimal has 1 to 38 digits, of"
                    " them 0 to all after the point, as decimal(38,2); longer numbers fit string,"
                    " and double if they need not be exact"
                ) from None
        refusal = refused_clause(value.upper().split()[1:], where=f"column '{where}'")
        if refusal is not None:
            raise refusal
        hint = suggestion(name, list(_SIMPLE_TYPES))
        # JSON has the form `list<int>` as a text.
        if (elsewhere := name.partition("<")[0]) in _NAMES_ELSEWHERE:
            hint = f"; did you mean '{_NAMES_ELSEWHERE[elsewhere]}'?"
        raise InvalidSchemaError(
            f"column '{where}': unknown type '{value[:200]}'{hint} (types:"
            f" {', '.join(_SIMPLE_TYPES)}, decimal(P,S), array<T>, map<K,V>, struct<name: T>)"
        )
    _check_depth(depth, where)
    depth += 1
    if isinstance(value, Mapping):
        kind = value.get("type")
        try:
            if kind == "array":
                inner = type_from_json(value["element"], where=f"{where}.element", depth=depth)
                nullable = bool(value.get("element_nullable", True))
                return pa.list_(pa.field("element", inner, nullable=nullable))
            if kind == "map":
                key = type_from_json(value["key"], where=f"{where}.key", depth=depth)
                item = type_from_json(value["value"], where=f"{where}.value", depth=depth)
                nullable = bool(value.get("value_nullable", True))
                return pa.map_(
                    pa.field("key", key, nullable=False),
                    pa.field("value", item, nullable=nullable),
                )
            if kind == "struct" and value["fields"]:
                _check_distinct(
                    [str(f["name"]) for f in value["fields"]], where=f"column '{where}': fields"
                )
                return pa.struct(
                    [
                        pa.field(
                            str(f["name"]),
                            type_from_json(f["type"], where=f"{where}.{f['name']}", depth=depth),
                            nullable=bool(f.get("nullable", True)),
                        )
                        for f in value["fields"]
                    ]
                )
        except (KeyError, TypeError) as error:
            raise InvalidSchemaError(f"column '{where}': malformed {kind} type") from error
    raise InvalidSchemaError(f"column '{where}': not a type: {_short(value)}")


def _short(value: Any) -> str:
    """Return a short text for a value, without the content of an object or list."""
    return type(value).__name__ if isinstance(value, Mapping | list) else repr(value)[:80]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column; `id` is its identity for life, in the log and in Iceberg.

    `default` is the text of the value of rows without the column: `model.casts.column_defaults`.
    """

    id: int
    name: str
    type: pa.DataType
    nullable: bool = True
    comment: str = ""
    default: str | None = None

    def to_arrow(self) -> pa.Field:
        """Return the Arrow field, without metadata."""
        return pa.field(self.name, self.type, nullable=self.nullable)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form used on the wire and on disk."""
        value = {
            "id": self.id,
            "name": self.name,
            "type": type_to_json(self.type),
            "nullable": self.nullable,
        }
        if self.default is not None:
            value["default"] = self.default
        return value | ({"comment": self.comment} if self.comment else {})


def _has_required_part(t: pa.DataType) -> bool:
    """Whether a nested part of a type must not be null, as the keys of a map."""
    if not pa.types.is_nested(t):
        return False
    if pa.types.is_map(t):
        return True
    parts = list(t) if pa.types.is_struct(t) else [t.value_field]
    return any(not part.nullable or _has_required_part(part.type) for part in parts)


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of a table in user order."""

    columns: tuple[Column, ...]
    _by_name: Mapping[str, Column] = dataclasses.field(init=False, repr=False, compare=False)
    _arrow: pa.Schema | None = dataclasses.field(
        default=None, init=False, repr=False, compare=False
    )
    strict_columns: Sequence[tuple[int, Column]] = dataclasses.field(
        init=False, repr=False, compare=False
    )
    """The columns, with positions, which are required or have a required nested part."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {column.name: column for column in self.columns})
        strict = [
            (position, column)
            for position, column in enumerate(self.columns)
            if not column.nullable or _has_required_part(column.type)
        ]
        object.__setattr__(self, "strict_columns", strict)
        if not self.columns:
            raise InvalidSchemaError("a table needs at least one column")
        if len(self.columns) > COLUMNS_MAX:
            raise InvalidSchemaError(f"{len(self.columns)} columns; at most {COLUMNS_MAX}")
        for column in self.columns:
            _check_column_name(column.name)
        _check_distinct([column.name for column in self.columns], where="columns")

    def __reduce__(self) -> tuple[type[Schema], tuple[tuple[Column, ...]]]:
        """Pickle only the columns; an executor computes the other attributes."""
        return Schema, (self.columns,)

    @classmethod
    def from_arrow(cls, schema: pa.Schema) -> Schema:
        """Number the fields from 1, with canonical types and the `comment` of their metadata."""
        columns = []
        next_id = 1
        for field in schema:
            _check_column_name(field.name)
            comment = (field.metadata or {}).get(b"comment", b"").decode("utf-8", "replace")
            columns.append(
                Column(
                    id=next_id,
                    name=field.name,
                    type=canonical_type(field.type, where=field.name),
                    nullable=field.nullable,
                    comment=comment,
                )
            )
            next_id += 1
        return cls(tuple(columns))

    @classmethod
    def from_json(cls, value: Any) -> Schema:
        """Read the JSON form, a list of columns; missing ids count from 1."""
        if not isinstance(value, list) or not all(isinstance(c, Mapping) for c in value):
            raise InvalidSchemaError("schema must be a list of columns {name, type, nullable}")
        columns = []
        for position, column in enumerate(value, start=1):
            name = column.get("name")
            if not isinstance(name, str):
                raise InvalidSchemaError(f"column {position} has no name")
            if "type" not in column:
                raise InvalidSchemaError(f"column '{name}' has no type")
            columns.append(
                Column(
                    id=_column_id(column.get("id", position), name),
                    name=name,
                    type=type_from_json(column["type"], where=name),
                    nullable=bool(column.get("nullable", True)),
                    comment=str(column.get("comment", "")),
                    default=column.get("default"),
                )
            )
        return cls(tuple(columns))

    def to_json(self) -> list[dict[str, Any]]:
        """Return the JSON form used on the wire and on disk."""
        return [column.to_json() for column in self.columns]

    def to_arrow(self) -> pa.Schema:
        """Return the canonical Arrow schema, without metadata."""
        if self._arrow is None:
            # Cached, because every batch of rows needs the Arrow schema.
            arrow = pa.schema([column.to_arrow() for column in self.columns])
            object.__setattr__(self, "_arrow", arrow)
        return self._arrow

    @property
    def names(self) -> list[str]:
        """The column names in user order."""
        return [column.name for column in self.columns]

    def column(self, name: str, *, table: object) -> Column:
        """Return the column called `name`; raises `UnknownColumnError` naming `table`."""
        column = self._by_name.get(name)
        if column is not None:
            return column
        raise UnknownColumnError(
            f"table '{table}' has no column '{name[:300]}'{suggestion(name, self.names)}"
            f" ({listing('columns', self.names)})"
        )

    def select(self, names: Sequence[str], *, table: str) -> Schema:
        """Return the schema of only `names`, in that order."""
        return Schema(tuple(self.column(name, table=table) for name in names))


def _column_id(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise InvalidSchemaError(f"column '{name[:80]}': its id must be a whole number from 1 on")
    return value


def _check_distinct(names: Sequence[str], *, where: str) -> None:
    seen: dict[str, str] = {}
    for name in names:
        # Spark resolves names without case by default: 'Id' beside 'id' could not be read.
        folded = name.lower()
        if folded in seen:
            raise InvalidSchemaError(
                f"{where} '{seen[folded]}' and '{name}' have the same name (names are compared"
                " without case)"
            )
        seen[folded] = name


def check_name_text(name: str) -> None:
    """Raise `InvalidNameError` for a text that cannot name a column or a nested field."""
    if not name or len(name) > COLUMN_NAME_CHARACTERS_MAX:
        raise InvalidNameError(
            f"column name '{name[:40]}' must have 1 to {COLUMN_NAME_CHARACTERS_MAX} characters"
        )
    if any(ord(c) < 32 for c in name):
        raise InvalidNameError(f"column name {name!r} has a control character")


def _check_column_name(name: str) -> None:
    check_name_text(name)
    if name.lower() in RESERVED_COLUMNS:
        raise InvalidNameError(
            f"column name '{name}' is reserved for Streamhouse; rename the column"
        )


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    """Return no rows of a schema with any types; `from_pylist` supports fewer types."""
    return pa.RecordBatch.from_arrays([pa.nulls(0, t) for t in schema.types], schema=schema)


def check_new_schema(schema: Schema, *, table: str) -> None:
    """Raise `InvalidSchemaError` for a schema above the limits for new schemas."""
    fields = comments = 0
    for column in schema.columns:
        depth, count = _extent(column.type)
        if depth > TYPE_DEPTH_MAX:
            raise InvalidSchemaError(
                f"table '{table}': column '{column.name}' is nested {depth} deep; at most"
                f" {TYPE_DEPTH_MAX}, a map counting as two"
            )
        fields += count
        if len(column.comment) > COMMENT_CHARACTERS_MAX:
            raise InvalidSchemaError(
                f"table '{table}': the comment of column '{column.name}' has"
                f" {len(column.comment)} characters; at most {COMMENT_CHARACTERS_MAX}"
            )
        comments += len(column.comment)
    if comments > COMMENTS_CHARACTERS_MAX:
        raise InvalidSchemaError(
            f"table '{table}': its comments have {comments} characters; at most"
            f" {COMMENTS_CHARACTERS_MAX} together"
        )
    if fields > NESTED_FIELDS_MAX:
        raise InvalidSchemaError(
            f"table '{table}': its columns have {fields} nested fields; at most"
            f" {NESTED_FIELDS_MAX} together"
        )


def _extent(t: pa.DataType) -> tuple[int, int]:
    """Return the depth of a nested type, and the number of its nested fields."""
    if not pa.types.is_nested(t):
        return 0, 0
    # To Arrow a map is a list of structs: two levels.
    children = [_extent(t.field(i).type) for i in range(t.num_fields)]
    return 1 + max((d for d, _ in children), default=0), sum(1 + c for _, c in children)
