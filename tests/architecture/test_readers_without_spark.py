"""Messages of rooms that work without Spark never advise a DataFrame."""

from __future__ import annotations

import ast

from tests.architecture.source_files import library_files


def test_no_message_below_the_connector_names_a_dataframe() -> None:
    advice = [
        f"{file}:{node.lineno}"
        for file in library_files()
        if not str(file).startswith("connector/")
        for node in _messages(file.nodes)
        if isinstance(node.value, str) and "DataFrame" in node.value and " " in node.value
    ]

    assert not advice


def _messages(nodes: list[ast.AST]) -> list[ast.Constant]:
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [n for n in nodes if isinstance(n, ast.Constant) and id(n) not in docstrings]
