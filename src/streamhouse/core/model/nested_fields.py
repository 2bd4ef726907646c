"""Types inside columns: their paths, additions and promotions of fields, and comparisons.

The path of a field begins with the name of its column. A struct's fields have their names, the
elements of an array are `element`, and the values of a map are `value`, as in Spark's ALTER TABLE:
`("orders", "element", "price")`. Nested fields can only be added and widened, never renamed. Equal
paths in two versions of one column are therefore the same field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import pyarrow as pa

from streamhouse.core.errors import InvalidSchemaError, listing, suggestion
from streamhouse.core.model.casts.nested import fields_of, with_fields
from streamhouse.core.model.schema import check_name_text, type_name

__all__ = [
    "ELEMENT",
    "VALUE",
    "fields_lacking",
    "has_same_fields",
    "is_wider",
    "named_like",
    "statistics_key",
    "wider_parts",
    "with_field",
    "with_type",
]

ELEMENT, VALUE = "element", "value"

_INTEGERS: Final = (pa.int8(), pa.int16(), pa.int32(), pa.int64())


def with_field(
    t: pa.DataType,
    path: Sequence[str],
    added: pa.DataType,
    *,
    where: str,
    predecessor: str | None = None,
    is_first: bool = False,
) -> pa.DataType:
    """Return type `t` with a nullable field added at `path`; `where` names the column.

    Raises `InvalidSchemaError` if no field can be added at `path`.
    """
    *parents, name = path

    def add(parent: pa.DataType, shown: str) -> pa.DataType:
        if not pa.types.is_struct(parent):
            raise _no_field(parent, name, where=shown)
        fields = list(parent)
        names = [field.name for field in fields]
        place = 0 if is_first else len(fields)
        if predecessor is not None:
            place = _place(predecessor, names, where=shown) + 1
        fields.insert(place, _new_field(name, added, names, where=shown))
        return pa.struct(fields)

    return _changed(t, parents, add, where=where)


def with_type(
    t: pa.DataType, path: Sequence[str], wider: pa.DataType, *, where: str
) -> pa.DataType:
    """Return type `t` with the type at `path` widened to `wider`; `where` names the column.

    Raises `InvalidSchemaError` if `path` does not exist, or its type does not widen to `wider`.
    """

    def widen(current: pa.DataType, shown: str) -> pa.DataType:
        if is_wider(wider, current):
            return wider
        raise InvalidSchemaError(
            f"'{shown}' of type {current} cannot become {wider}: integers widen to larger ones,"
            " float to double, a decimal to more digits of the same scale"
        )

    return _changed(t, path, widen, where=where)


def is_wider(wide: pa.DataType, narrow: pa.DataType) -> bool:
    """Whether Iceberg's type promotion leads from `narrow` to the different type `wide`."""
    if wide in _INTEGERS and narrow in _INTEGERS:
        return _INTEGERS.index(wide) > _INTEGERS.index(narrow)
    if pa.types.is_decimal(wide) and pa.types.is_decimal(narrow):
        return bool(wide.scale == narrow.scale and wide.precision > narrow.precision)
    return bool(narrow == pa.float32() and wide == pa.float64())


def _changed(
    t: pa.DataType,
    path: Sequence[str],
    change: Callable[[pa.DataType, str], pa.DataType],
    *,
    where: str,
) -> pa.DataType:
    """Return `t` changed at `path`; `change` receives the type there and its name."""
    if not path:
        return change(t, where)
    name, *below = path

    def inside(field: pa.Field) -> pa.Field:
        return field.with_type(_changed(field.type, below, change, where=f"{where}.{name}"))

    if pa.types.is_struct(t):
        fields = list(t)
        place = _place(name, [field.name for field in fields], where=where)
        fields[place] = inside(fields[place])
        return pa.struct(fields)
    if pa.types.is_list(t) and name == ELEMENT:
        return pa.list_(inside(t.value_field))
    if pa.types.is_map(t) and name == VALUE:
        return pa.map_(t.key_field, inside(t.item_field))
    raise _no_field(t, name, where=where)


def _no_field(t: pa.DataType, name: str, *, where: str) -> InvalidSchemaError:
    """Return the error for a field `name` in a type which is not a struct."""
    is_map = pa.types.is_map(t)
    if is_map and name == "key":
        return InvalidSchemaError(f"'{where}' is a map, and the type of a map's keys is fixed")
    if not is_map and not pa.types.is_list(t):
        return InvalidSchemaError(
            f"'{where}' is {type_name(t)}, no struct, so no field '{name}' can be in it"
        )
    kind, parts, part = ("a map", "values", VALUE) if is_map else ("an array", "elements", ELEMENT)
    return InvalidSchemaError(
        f"'{where}' is {kind}: a field of its {parts} is '{where}.{part}' and the field's name"
    )


def _place(name: str, names: list[str], *, where: str) -> int:
    if name not in names:
        raise InvalidSchemaError(
            f"'{where}' has no field '{name[:300]}'{suggestion(name, names)}"
            f" ({listing('fields', names)})"
        )
    return names.index(name)


def _new_field(name: str, t: pa.DataType, names: list[str], *, where: str) -> pa.Field:
    check_name_text(name)
    same = [sibling for sibling in names if sibling.lower() == name.lower()]
    if same:
        raise InvalidSchemaError(
            f"'{where}' has a field '{same[0]}' already (names are compared without case)"
        )
    return pa.field(name, t)


def has_same_fields(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether values of type `source` have the fields of `target`, at every depth.

    Simple types are not compared. The null type fits any type.
    """
    if pa.types.is_struct(source) and pa.types.is_struct(target):
        return [field.name for field in source] == [field.name for field in target] and all(
            has_same_fields(g.type, k.type) for g, k in zip(source, target, strict=True)
        )
    if pa.types.is_map(source) and pa.types.is_map(target):
        return has_same_fields(source.key_type, target.key_type) and has_same_fields(
            source.item_type, target.item_type
        )
    if _is_list(source) and pa.types.is_list(target):
        return has_same_fields(source.value_type, target.value_type)
    return True


def fields_lacking(
    current: pa.DataType, newer: pa.DataType
) -> Iterator[tuple[tuple[str, ...], pa.DataType]]:
    """Yield path and type of each field of `newer` missing from `current`, outermost fields only.

    Fields inside the keys of maps are ignored: map keys cannot get new fields.
    """
    if pa.types.is_struct(newer) and pa.types.is_struct(current):
        current_types = {field.name: field.type for field in current}
        for field in newer:
            if field.name not in current_types:
                yield (field.name,), field.type
                continue
            for path, t in fields_lacking(current_types[field.name], field.type):
                yield (field.name, *path), t
    elif pa.types.is_map(newer) and pa.types.is_map(current):
        for path, t in fields_lacking(current.item_type, newer.item_type):
            yield (VALUE, *path), t
    elif _is_list(newer) and pa.types.is_list(current):
        for path, t in fields_lacking(current.value_type, newer.value_type):
            yield (ELEMENT, *path), t


def wider_parts(
    current: pa.DataType, newer: pa.DataType
) -> Iterator[tuple[tuple[str, ...], pa.DataType]]:
    """Yield path and type of each simple type in `newer` wider than its type in `current`.

    The path of the whole is empty. The keys of maps are ignored: their types are fixed.
    """
    if is_wider(newer, current):
        yield (), newer
    pairs: list[tuple[str, pa.DataType, pa.DataType]] = []
    if pa.types.is_struct(newer) and pa.types.is_struct(current):
        current_types = {field.name: field.type for field in current}
        pairs = [(f.name, current_types[f.name], f.type) for f in newer if f.name in current_types]
    elif pa.types.is_map(newer) and pa.types.is_map(current):
        pairs = [(VALUE, current.item_type, newer.item_type)]
    elif _is_list(newer) and pa.types.is_list(current):
        pairs = [(ELEMENT, current.value_type, newer.value_type)]
    for name, current_part, newer_part in pairs:
        for path, t in wider_parts(current_part, newer_part):
            yield (name, *path), t


def named_like(source: pa.DataType, target: pa.DataType) -> pa.DataType:
    """Return `source` with the field names of `target`, matched without case."""
    if pa.types.is_struct(source) and pa.types.is_struct(target):
        target_fields = {field.name.lower(): field for field in target}
        fields = []
        for field in source:
            same = target_fields.get(field.name.lower())
            if same is not None:
                field = field.with_name(same.name).with_type(named_like(field.type, same.type))
            fields.append(field)
        return pa.struct(fields)
    fields = fields_of(source)
    if not fields or source.id != target.id:
        return source
    pairs = zip(fields, fields_of(target), strict=True)
    return with_fields(source, [f.with_type(named_like(f.type, t.type)) for f, t in pairs])


def _is_list(t: pa.DataType) -> bool:
    return bool(pa.types.is_list(t) or pa.types.is_large_list(t) or pa.types.is_fixed_size_list(t))


def statistics_key(path: tuple[str, ...]) -> str:
    """Return the name under which statistics of the column at `path` are kept: `a.b`."""
    return ".".join(f"`{p.replace('`', '``')}`" if "." in p or "`" in p else p for p in path)
