"""No module of the library imports itself through others, also not inside functions.

An import inside a function hides a cycle from Python, not from a reader: neither of the two can be
understood, tested or moved without the other.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Mapping

from tests.architecture.source_files import SourceFile, library_files


def _imports() -> dict[str, frozenset[str]]:
    """Return module -> the library's modules that it imports, anywhere in it."""
    names = {file.module for file in library_files()}
    return {file.module: _imported(file, names) for file in library_files()}


def _imported(file: SourceFile, names: Container[str]) -> frozenset[str]:
    found = set()
    for node in file.nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                # A name of a package is a module in it, or something that its __init__ has.
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in names else node.module)
    return frozenset(name for name in found if name in names and name != file.module)


def _cycles(imports: Mapping[str, Iterable[str]]) -> set[frozenset[str]]:
    """Return the sets of modules that all reach each other, as Tarjan finds them."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found: set[frozenset[str]] = set()

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        path.append(module)
        for imported in imports[module]:
            if imported not in index:
                visit(imported)
                low[module] = min(low[module], low[imported])
            elif imported in path:
                low[module] = min(low[module], index[imported])
        if low[module] == index[module]:
            start = path.index(module)
            component = frozenset(path[start:])
            del path[start:]
            if len(component) > 1:
                found.add(component)

    for module in imports:
        if module not in index:
            visit(module)
    return found


def test_a_cycle_is_found() -> None:
    imports = {"a": ["b"], "b": ["c"], "c": ["b"], "d": ["a", "c"]}

    assert _cycles(imports) == {frozenset({"b", "c"})}


def test_no_module_imports_itself_through_others() -> None:
    assert not _cycles(_imports())
