"""Tests replace no function of ours by hand: `tests/support/held_step.py` does, with its reasons.

Of the operating system and of libraries anything may be replaced.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import Final

import pytest

from tests.architecture.source_files import SourceFile, source_files
from tests.support.held_step import BOUNDS, STEPS, Place

HELPER: Final = "tests/support/held_step.py"

# What replaces functions of ours all the same, and why. An entry that does not fails a test.
LEFT: Final[dict[str, str]] = {
    "tests/support/failing_disk.py": "a program: it breaks its disk once its service is ready",
    "tests/simulation/kv_crash_child.py": "a program that kills itself in a write",
    "tests/simulation/transaction_crash_child.py": "a program that kills itself in a commit",
    "tests/torture/doomed_service.py": "a program that kills itself at a step; the steps are there",
    "tests/unit/storage_service/kv/test_rocksdb_store.py": "RocksDB's own class cannot be replaced",
}

_OURS: Final = ("streamhouse", "tests", "integration")
_CHANGED_METHOD: Final = re.compile(r"type: ignore\[[^]]*\bmethod-assign\b")


def _imported(file: SourceFile) -> dict[str, str]:
    """Return the names of `file` that are imported, and from which module."""
    found = {}
    for node in file.nodes:
        if isinstance(node, ast.Import):
            found |= {a.asname or a.name.partition(".")[0]: a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name: node.module or "" for a in node.names}
    return found


def _is_ours(target: ast.expr, imported: dict[str, str]) -> bool:
    """Whether something to be replaced is neither the operating system's nor a library's."""
    if isinstance(target, ast.Constant):
        return str(target.value).startswith(_OURS)
    while isinstance(target, ast.Attribute):
        target = target.value
    if not isinstance(target, ast.Name) or target.id not in imported:
        return True
    return imported[target.id].partition(".")[0] in _OURS


def _is_product(module: str) -> bool:
    return module.partition(".")[0] == "streamhouse"


def _replaced(file: SourceFile) -> Iterator[int]:
    """Yield the lines of `file` that replace something of ours."""
    imported = _imported(file)
    for node in file.nodes:
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in ("setattr", "delattr") and _is_ours(node.args[0], imported):
                yield node.lineno
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if not isinstance(target, ast.Attribute):
                    continue
                root = target.value
                while isinstance(root, ast.Attribute):
                    root = root.value
                # Of a module or class of the product; or a method, which mypy notices.
                is_product = isinstance(root, ast.Name) and _is_product(imported.get(root.id, ""))
                is_method = _CHANGED_METHOD.search(file.lines[(node.end_lineno or 1) - 1])
                if is_product or (is_method and _is_ours(target.value, imported)):
                    yield node.lineno
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [f"{getattr(node, 'module', '')}.{alias.name}" for alias in node.names]
            if any("unittest.mock" in name for name in names):
                yield node.lineno


def test_no_test_replaces_functions_of_ours_by_hand() -> None:
    found = {
        str(file): lines
        for file in source_files()
        if file.path.parts[0] in _OURS and str(file) != HELPER
        if (lines := list(_replaced(file)))
    }

    assert [f"{path}:{lines}" for path, lines in found.items() if path not in LEFT] == [], (
        f"inject it, let a fake fail, break the system beneath; else name the step in {HELPER}"
    )
    assert set(LEFT) <= set(found), "an entry of LEFT is no longer needed"


@cache
def _texts() -> frozenset[str]:
    """The texts that any file but the helper has."""
    return frozenset(
        node.value
        for file in source_files()
        if str(file) != HELPER
        for node in file.nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


@pytest.mark.parametrize("name", [*STEPS, *BOUNDS])
def test_what_is_replaced_is_there_and_is_asked_for(name: str) -> None:
    place: Place = (STEPS | BOUNDS)[name]

    place.owner()
    assert place.why
    assert name in _texts(), "no test asks for it: take it out"
