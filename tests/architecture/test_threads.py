"""One module makes all threads, so that each has a name, a bound and a line in the status."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from typing import Final

from tests.architecture.source_files import SourceFile, library_files

_MAKER: Final = "streamhouse.core.threads"
_CLASSES: Final = frozenset({"Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor"})
_MAKERS: Final = frozenset({"Pool", "NamedThread", "timer"})


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _uses(file: SourceFile) -> Iterator[str]:
    """Yield the library classes that a file calls or subclasses."""
    for node in file.nodes:
        if isinstance(node, ast.Call):
            yield _name_of(node.func)
        elif isinstance(node, ast.ClassDef):
            yield from map(_name_of, node.bases)


def test_no_other_module_makes_a_thread() -> None:
    assert not {
        file.module: uses
        for file in library_files()
        if file.module != _MAKER and (uses := _CLASSES.intersection(_uses(file)))
    }, f"make the thread or pool with {_MAKER}"


def test_every_kind_of_thread_has_its_own_name() -> None:
    names = Counter(
        ast.unparse(node.args[0])
        for file in library_files()
        if file.module != _MAKER
        for node in file.nodes
        if isinstance(node, ast.Call) and _name_of(node.func) in _MAKERS
    )

    assert len(names) > 30
    assert [name for name, count in names.items() if count > 1] == []
