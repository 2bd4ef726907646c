"""The fields of columns in a file without field ids: found by name.

A table of files that were written without ids has a property, the name mapping of Iceberg's
specification: a tree of names, each with the id of a field. Several names may belong to a field,
and a name is looked up within its struct. Executors have this module, which does not import the
Iceberg library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["MappedField", "NameMapping", "inside", "is_renaming"]


@dataclass(frozen=True, slots=True)
class MappedField:
    """The field of one name: id, the present name in the table, and the names of the nested fields.

    Without `field_id` the table never had the field; without `name` it has the field no more.
    """

    field_id: int | None
    name: str | None
    fields: NameMapping


NameMapping: TypeAlias = Mapping[str, MappedField]
"""Name in the file -> the field; in a list the name is `element`, in a map `key` and `value`."""


def inside(mapping: NameMapping | None, name: str) -> NameMapping | None:
    """Return the names inside the field of a name; None if nothing is said of them."""
    return mapping[name].fields if mapping and name in mapping else None


def is_renaming(mapping: NameMapping | None) -> bool:
    """Whether any name of the tree is not what the table calls the field now."""
    return any(name != m.name or is_renaming(m.fields) for name, m in (mapping or {}).items())
