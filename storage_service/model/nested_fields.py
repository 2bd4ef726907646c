"""Fields inside columns: how they are named, how one is added, and who has which.

A field's path begins with its column's name. Below it a struct's fields have their names, the
elements of an array are `element`, and the values of a map `value`, as in Spark's ALTER TABLE:
`("orders", "element", "price")`. Fields are only ever added, and keep their names; so of two
versions of one column equal paths are the same field.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from streamhouse.storage_service.errors import InvalidSchemaError, listing, suggestion
from streamhouse.storage_service.model.schema import check_name_text, type_name

__all__ = ["ELEMENT", "VALUE", "fields_lacking", "has_same_fields", "named_like", "with_field"]

ELEMENT, VALUE = "element", "value"


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
    name, *below = path
    if pa.types.is_struct(t):
        fields = list(t)
        names = [field.name for field in fields]
        if not below:
            place = 0 if is_first else len(fields)
            if after is not None:
                place = _place(after, names, where=where) + 1
            fields.insert(place, _new_field(name, added, names, where=where))
            return pa.struct(fields)
        place = _place(name, names, where=where)
        inner = with_field(
            fields[place].type,
            below,
            added,
            where=f"{where}.{name}",
            after=after,
            is_first=is_first,
        )
        fields[place] = fields[place].with_type(inner)
        return pa.struct(fields)
    is_list, is_map = pa.types.is_list(t), pa.types.is_map(t)
    if is_map and name == "key":
        raise InvalidSchemaError(f"'{where}' is a map, and the type of a map's keys is fixed")
    part = ELEMENT if is_list else VALUE
    if not (is_list or is_map):
        raise InvalidSchemaError(
            f"'{where}' is {type_name(t)}, no struct, so no field '{name}' can be in it"
        )
    if name != part or not below:
        kind = "an array" if is_list else "a map"
        what = "elements" if is_list else "values"
        raise InvalidSchemaError(
            f"'{where}' is {kind}: a field of its {what} is '{where}.{part}' and the field's name"
        )
    field = t.value_field if is_list else t.item_field
    inner = with_field(
        field.type, below, added, where=f"{where}.{part}", after=after, is_first=is_first
    )
    field = field.with_type(inner)
    return pa.list_(field) if is_list else pa.map_(t.key_field, field)


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
