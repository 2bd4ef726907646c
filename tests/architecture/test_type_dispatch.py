"""The modules that dispatch over many types may only become fewer: `core/types` has the forms."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from tests.architecture.source_files import SourceFile, library_files

MODULES_MAX: Final = 7
"""Modules outside of `core/types` that dispatch over `_FAMILIES_MIN` families of types:

- `core/model/schema`: layouts of other programs become canonical types, and `type_of` knows only
  canonical types
- `core/model/casts/lossless`, `core/rows/row_splitter`, `connector/write/_assignment`: a cast
  depends on two types
- `reading/where/_literal`, `reading/where/predicate`: a comparison depends on two types, or on a
  type and the kind of a literal
- `kafka/values/_debezium`: an encoding of Kafka Connect depends on the type and on the event's
  schema
"""
_FAMILIES_MIN: Final = 5
_FAMILIES: Final = {
    "boolean": "boolean bool_ BooleanType",
    "integer": "integer signed_integer int8 int16 int32 int64 IntegerType LongType",
    "float": "floating float32 float64 FloatType DoubleType",
    "decimal": "decimal decimal128 DecimalType",
    "text": "string large_string StringType",
    "binary": "binary large_binary BinaryType FixedType",
    "date": "date date32 DateType",
    "timestamp": "timestamp TimestampType TimestamptzType",
    "nested": "nested struct list list_ map map_ StructType ListType MapType",
}
_FAMILY_OF: Final = {name: family for family, names in _FAMILIES.items() for name in names.split()}


def _type_names(node: ast.AST) -> Iterator[str]:
    """Yield the names of types that a node tests, or has as keys or values of a table."""
    if isinstance(node, ast.Attribute) and node.attr.startswith("is_"):
        yield node.attr.removeprefix("is_")
    elif isinstance(node, ast.Dict | ast.Set | ast.Compare | ast.MatchClass) or (
        isinstance(node, ast.Attribute) and node.attr == "id"
    ):
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute | ast.Name):
                yield part.attr if isinstance(part, ast.Attribute) else part.id
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
        yield from (part.id for part in ast.walk(node) if isinstance(part, ast.Name))


def _families(file: SourceFile) -> set[str]:
    if not {"pyarrow", "pyiceberg.types"} & file.imports:
        return set()
    names = (name for node in file.nodes for name in _type_names(node))
    return {_FAMILY_OF[name] for name in names if name in _FAMILY_OF}


def test_modules_that_dispatch_over_many_types_become_fewer() -> None:
    modules = [
        file.module
        for file in library_files()
        if not file.module.startswith("streamhouse.core.types")
        and len(_families(file)) >= _FAMILIES_MIN
    ]

    assert len(modules) <= MODULES_MAX, f"give the forms to streamhouse.core.types: {modules}"
    assert len(modules) >= MODULES_MAX - 1, f"lower MODULES_MAX to {len(modules)}"
