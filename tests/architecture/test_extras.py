"""A part imports what its extra installs, and is entered from a lighter one behind `require`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

import pytest

from streamhouse.core.extras import EXTRAS, PARTS, extra_of
from tests.architecture.source_files import SourceFile, library_files

# What the client stands on; and what comes with a package that an extra names.
LIGHT: Final = {"click", "httptools", "mmh3", "numpy", "pyarrow", "rich"}
BROUGHT: Final = {
    "lake": {"pydantic", "requests", "urllib3"},
    "spark": {"py4j"},
    "server": {"pydantic", "starlette", "uvloop"},
    "sql": set[str](),
    "cdc": set[str](),
    "kafka": set[str](),
    "otel": set[str](),
}


@dataclass(frozen=True, slots=True)
class Import:
    """One import as Python runs it: what it names, and the functions that it is in."""

    name: str
    functions: tuple[ast.AST, ...]


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _imports_of(node: ast.AST, functions: tuple[ast.AST, ...] = ()) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if _is_for_types(child):
            continue
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, functions) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            for alias in child.names:
                full = f"{child.module}.{alias.name}"
                yield Import(full if full in _modules() else child.module, functions)
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports_of(child, (*functions, child) if is_function else functions)


@cache
def _modules() -> dict[str, SourceFile]:
    return {file.module: file for file in library_files()}


@cache
def _imports(module: str) -> tuple[Import, ...]:
    return tuple(_imports_of(_modules()[module].tree))


def _allowed_packages(extra: str) -> set[str]:
    if not extra:
        return LIGHT
    modules = {name.partition(".")[0] for name in EXTRAS[extra].modules}
    allowed = LIGHT | modules | BROUGHT[extra]
    return allowed.union(*(_allowed_packages(included) for included in EXTRAS[extra].includes))


def _has(extra: str, other: str) -> bool:
    """Whether who has `extra` has all of `other`."""
    return _allowed_packages(other) <= _allowed_packages(extra)


@cache
def _loaded_with(module: str) -> tuple[set[str], set[str]]:
    """Modules of ours, and packages of others, that importing a module brings in."""
    ours: set[str] = set()
    others: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in ours:
            continue
        if name not in _modules():
            others.add(name.partition(".")[0])
            continue
        ours.add(name)
        parts = name.split(".")
        waiting += [".".join(parts[:count]) for count in range(1, len(parts))]
        waiting += [found.name for found in _imports(name) if not found.functions]
    return ours, others - sys.stdlib_module_names - {"streamhouse"}


def test_every_part_of_the_table_is_there() -> None:
    assert {part for part in PARTS if part not in _modules()} == set()
    assert set(PARTS.values()) <= {"", *EXTRAS}


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_a_part_imports_no_more_than_its_extra_installs(extra: str) -> None:
    allowed = _allowed_packages(extra)

    too_much = {
        module: sorted(others - allowed)
        for module in _modules()
        if extra_of(module) == extra
        for _, others in [_loaded_with(module)]
        if others - allowed
    }

    assert too_much == {}


def _requires(functions: tuple[ast.AST, ...]) -> set[str]:
    """The extras that are required around an import."""
    return {
        node.args[0].value
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "require"
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    }


def test_a_heavier_part_is_entered_behind_its_sentence() -> None:
    """A function that imports what an extra installs has called `require` for it."""
    silent = []
    for module in _modules():
        have = extra_of(module)
        for found in _imports(module):
            package = found.name.partition(".")[0]
            if not found.functions or package in sys.stdlib_module_names:
                continue
            others = _loaded_with(found.name)[1]
            if found.name in _modules():
                others = others | _allowed_packages(extra_of(found.name))
            required = _requires(found.functions)
            if not any(others <= _allowed_packages(extra) for extra in (have, *required)):
                silent.append(f"{module} imports {found.name}")

    assert silent == [], "\n".join(silent)


def test_an_extra_has_what_it_includes() -> None:
    assert _has("spark", "lake")
    assert _has("server", "lake")
    assert not _has("", "lake")
    assert not _has("lake", "spark")
