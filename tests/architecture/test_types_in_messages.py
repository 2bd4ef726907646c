"""Types have the same names in every message: those of the DDL, as `type_name` gives them."""

from __future__ import annotations

import ast

from tests.architecture.source_files import library_files


def test_a_message_has_the_ddl_name_of_a_type() -> None:
    bare = [
        f"{file}:{node.lineno}"
        for file in library_files()
        for node in file.nodes
        if isinstance(node, ast.FormattedValue)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr in ("type", "value_type")
        and isinstance(node.value.value, ast.Name)
    ]

    assert not bare
