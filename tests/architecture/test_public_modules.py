"""A room's public modules have no underscore: other rooms import these, and no others."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from typing import Final

from tests.architecture.source_files import SourceFile, library_files

# No room of the house stands above these, so none of their modules is public.
_TOP_ROOMS: Final = frozenset({"streamhouse", "streamhouse.api", "streamhouse.cli"})
# Spark and the command line start these by a path or a name that is put together.
_STARTED: Final = frozenset(
    {
        "pyspark_streamhouse",
        "streamhouse.tiering.spark_job",
    }
)
# These name modules to say what they need, and import none of them.
_LISTS: Final = frozenset({"streamhouse.core.extras"})


def room_of(module: str) -> str:
    """Return the room of a module: a package of the house, or one of the service's packages."""
    parts = module.split(".")
    return ".".join(parts[: 3 if parts[1:2] == ["storage_service"] else 2])


def _is_private(module: str) -> bool:
    return any(part.startswith("_") for part in module.split("."))


def _named_modules(file: SourceFile, modules: frozenset[str]) -> frozenset[str]:
    """Return the modules of the house that a file imports, or names in a string."""
    strings = {
        node.value
        for node in file.nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return frozenset((file.imports | strings) & modules)


@cache
def _users() -> dict[str, frozenset[str]]:
    """Return, for each module of the house, the rooms that import the module."""
    files = {file.module: file for file in library_files()}
    modules = frozenset(files)
    users = defaultdict(set)
    for module, file in files.items():
        if module not in _LISTS:
            for imported in _named_modules(file, modules):
                users[imported].add(room_of(module))
    return {module: frozenset(users[module]) for module in modules}


def test_a_private_module_is_imported_by_its_own_room_only() -> None:
    assert not {
        module: rooms
        for module, users in _users().items()
        if _is_private(module) and (rooms := users - {room_of(module)})
    }


def test_a_module_that_no_other_room_imports_is_private() -> None:
    packages = {f.module for f in library_files() if f.path.name == "__init__.py"}

    assert not [
        module
        for module, users in _users().items()
        if not _is_private(module)
        and room_of(module) not in _TOP_ROOMS
        and module not in packages | _STARTED
        and not users - {room_of(module)}
    ], "give these modules names that begin with an underscore"
