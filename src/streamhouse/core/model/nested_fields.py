"""Types inside columns: how they are named, how a field is added or widened, and who has which.

A field's path begins with its column's name. Below it a struct's fields have their names, the
elements of an array are `element`, and the values of a map `value`, as in Spark's ALTER TABLE:
`("orders", "element", "price")`. Fields are only ever added and widened, and keep their names; so
of two versions of one column equal paths are the same field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import pyarrow as pa

from streamhouse.core.errors import InvalidSchemaError, listing, suggestion
from streamhouse.core.model.schema import check_name_text, type_name

__all__ = [
    "ELEMENT",
    "VALUE",
    "fields_lacking",
    "has_same_fields",
    "is_wider",
    "named_like",
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
    after: str | None = None,
    is_first: bool = False,
) -> pa.DataType:
    """Return type `t`, of what `where` names, with a nullable field added at `path` inside it.

    Raises `InvalidSchemaError` where no field can be.
    """
    *parents, name = path

    def add(parent: pa.DataType, shown: str) -> pa.DataType:
        if not pa.types.is_struct(parent):
            raise _no_field(parent, name, where=shown)
        fields = list(parent)
        names = [field.name for field in fields]
        place = 0 if is_first else len(fields)
        if after is not None:
            place = _place(after, names, where=shown) + 1
        fields.insert(place, _new_field(name, added, names, where=shown))
        return pa.struct(fields)

    return _changed(t, parents, add, where=where)


def with_type(
    t: pa.DataType, path: Sequence[str], wanted: pa.DataType, *, where: str
) -> pa.DataType:
    """Return type `t`, of what `where` names, with what is at `path` inside it widened to `wanted`.

    Raises `InvalidSchemaError` where nothing is, or something that does not widen to it.
    """

    def widen(given: pa.DataType, shown: str) -> pa.DataType:
        if is_wider(wanted, given):
            return wanted
        raise InvalidSchemaError(
            f"'{shown}' of type {given} cannot become {wanted}: integers widen to larger ones,"
            " float to double, a decimal to more digits of the same scale"
        )

    return _changed(t, path, widen, where=where)


def is_wider(wanted: pa.DataType, given: pa.DataType) -> bool:
    """Whether Iceberg's type promotion leads from `given` to `wanted`, and it is not the same."""
    if wanted in _INTEGERS and given in _INTEGERS:
        return _INTEGERS.index(wanted) > _INTEGERS.index(given)
    if pa.types.is_decimal(wanted) and pa.types.is_decimal(given):
        return bool(wanted.scale == given.scale and wanted.precision > given.precision)
    return bool(given == pa.float32() and wanted == pa.float64())


def _changed(
    t: pa.DataType,
    path: Sequence[str],
    change: Callable[[pa.DataType, str], pa.DataType],
    *,
    where: str,
) -> pa.DataType:
    """Return `t` with what is at `path` inside it changed; `change` is told what to call it."""
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
    """Return why there is no field `name` in what is no struct."""
    is_map = pa.types.is_map(t)
    if is_map and name == "key":
        return InvalidSchemaError(f"'{where}' is a map, and the type of a map's keys is fixed")
    if not is_map and not pa.types.is_list(t):
        return InvalidSchemaError(
            f"'{where}' is {type_name(t)}, no struct, so no field '{name}' can be in it"
        )
    kind, what, part = ("a map", "values", VALUE) if is_map else ("an array", "elements", ELEMENT)
    return InvalidSchemaError(
        f"'{where}' is {kind}: a field of its {what} is '{where}.{part}' and the field's name"
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
    same = [other for other in names if other.lower() == name.lower()]
    if same:
        raise InvalidSchemaError(
            f"'{where}' has a field '{same[0]}' already (names are compared without case)"
        )
    return pa.field(name, t)


def has_same_fields(given: pa.DataType, known: pa.DataType) -> bool:
    """Whether values of type `given` have the fields that `known` has, at every depth.

    Simple types are not compared. A value without a type, all of it null, fits any.
    """
    if pa.types.is_struct(given) and pa.types.is_struct(known):
        return [field.name for field in given] == [field.name for field in known] and all(
            has_same_fields(g.type, k.type) for g, k in zip(given, known, strict=True)
        )
    if pa.types.is_map(given) and pa.types.is_map(known):
        return has_same_fields(given.key_type, known.key_type) and has_same_fields(
            given.item_type, known.item_type
        )
    if _is_list(given) and pa.types.is_list(known):
        return has_same_fields(given.value_type, known.value_type)
    return True


def fields_lacking(
    known: pa.DataType, given: pa.DataType
) -> Iterator[tuple[tuple[str, ...], pa.DataType]]:
    """Yield path and type of each field that `given` has and `known` has not, outermost alone.

    Those in the keys of maps are not looked for: they cannot be added.
    """
    if pa.types.is_struct(given) and pa.types.is_struct(known):
        own = {field.name: field.type for field in known}
        for field in given:
            if field.name not in own:
                yield (field.name,), field.type
                continue
            for path, t in fields_lacking(own[field.name], field.type):
                yield (field.name, *path), t
    elif pa.types.is_map(given) and pa.types.is_map(known):
        for path, t in fields_lacking(known.item_type, given.item_type):
            yield (VALUE, *path), t
    elif _is_list(given) and pa.types.is_list(known):
        for path, t in fields_lacking(known.value_type, given.value_type):
            yield (ELEMENT, *path), t


def wider_parts(
    known: pa.DataType, given: pa.DataType
) -> Iterator[tuple[tuple[str, ...], pa.DataType]]:
    """Yield path and type of each simple type in `given` that is wider than the one in `known`.

    The path of the whole is empty. The keys of maps are not looked at: their types are fixed.
    """
    if is_wider(given, known):
        yield (), given
    pairs: list[tuple[str, pa.DataType, pa.DataType]] = []
    if pa.types.is_struct(given) and pa.types.is_struct(known):
        own = {field.name: field.type for field in known}
        pairs = [(f.name, own[f.name], f.type) for f in given if f.name in own]
    elif pa.types.is_map(given) and pa.types.is_map(known):
        pairs = [(VALUE, known.item_type, given.item_type)]
    elif _is_list(given) and pa.types.is_list(known):
        pairs = [(ELEMENT, known.value_type, given.value_type)]
    for name, before, after in pairs:
        for path, t in wider_parts(before, after):
            yield (name, *path), t


def named_like(given: pa.DataType, known: pa.DataType) -> pa.DataType:
    """Return `given` with its fields named as in `known`, which they match without case."""
    if pa.types.is_struct(given) and pa.types.is_struct(known):
        own = {field.name.lower(): field for field in known}
        fields = []
        for field in given:
            same = own.get(field.name.lower())
            if same is not None:
                field = field.with_name(same.name).with_type(named_like(field.type, same.type))
            fields.append(field)
        return pa.struct(fields)
    if pa.types.is_map(given) and pa.types.is_map(known):
        key, item = given.key_field, given.item_field
        return pa.map_(
            key.with_type(named_like(key.type, known.key_type)),
            item.with_type(named_like(item.type, known.item_type)),
        )
    if pa.types.is_list(given) and pa.types.is_list(known):
        inner = named_like(given.value_type, known.value_type)
        return pa.list_(given.value_field.with_type(inner))
    return given


def _is_list(t: pa.DataType) -> bool:
    return bool(pa.types.is_list(t) or pa.types.is_large_list(t) or pa.types.is_fixed_size_list(t))
