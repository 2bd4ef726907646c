"""What we take from libraries that they do not promise: listed, so that an upgrade of one begins
with a look at each.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from typing import Final

import pytest

from tests.architecture.source_files import SourceFile, library_files

_LIBRARY: Final = "pyiceberg"
# Packages of it that are not in its API documentation: decoders, and helpers of its own.
_INTERNAL: Final = ("pyiceberg.avro", "pyiceberg.utils")

_LAKE: Final = "streamhouse.lake."

USED: Final = {
    # Catalogs: what a commit sends or writes is decided before, or beside, the library's own steps.
    "_ENV_CONFIG",
    "_convert_orm_to_iceberg",
    "_create_legacy_oauth2_auth_manager",
    "_create_session",
    "_create_table_row",
    "_delete_old_metadata",
    "_do_commit",
    "_empty_table_metadata",
    "_fetch_config",
    "_handle_non_200_response",
    "_load_file_io",
    "_refresh_token",
    "_resolve_table_location",
    "_session",
    "_supported_endpoints",
    "_table",
    "_update_and_stage_table",
    "_write_metadata",
    # Upgrades to format version 3.
    "_TableMetadataUpdateContext",
    "_apply_table_update",
    "_construct_without_validation",
    # Manifests, read and written with what is made of their schema once.
    "_data",
    "_inherit_from_manifest",
    "_meta",
    "_output_file",
    "_schema",
    "_spec",
    "_write_header",
    "pyiceberg.avro.codecs",
    "pyiceberg.avro.decoder",
    "pyiceberg.avro.file",
    "pyiceberg.avro.reader",
    "pyiceberg.avro.resolver",
    "pyiceberg.avro.writer",
    "pyiceberg.utils.schema_conversion",
}


# Of the other libraries: private attributes, and what is imported from undocumented modules.
# uvicorn's connection is subclassed, so setup.cfg ends before its next release.
USED_OF_OTHERS: Final = {
    "fastapi": set[str](),
    "httptools": set[str](),
    "pyspark": {"_df", "_jdf", "_jsparkSession", "_jsq", "_jvm", "_write_stream"},
    "starlette": set[str](),
    "uvicorn": {
        "uvicorn.protocols.http.flow_control.FlowControl",
        "uvicorn.protocols.http.httptools_impl.HttpToolsProtocol",
        "uvicorn.protocols.http.httptools_impl.RequestResponseCycle",
        "uvicorn.protocols.http.httptools_impl.STATUS_LINE",
    },
}
_INTERNAL_OF_OTHERS: Final = ("uvicorn.protocols", "uvicorn._", "starlette._", "fastapi._")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _users() -> Iterator[SourceFile]:
    for file in library_files():
        if any(name.partition(".")[0] == _LIBRARY for name in file.imports):
            yield file


def _imported(file: SourceFile) -> Iterator[str]:
    """Yield private names that are imported, and modules without a promise."""
    for node in file.nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_LIBRARY):
            if (node.module or "").startswith(_INTERNAL):
                yield node.module or ""
            yield from (alias.name for alias in node.names if _is_private(alias.name))


def _looked_up(file: SourceFile) -> Iterator[str]:
    """Yield private attributes of objects that are not the file's own."""
    own = {node.name for node in file.nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in file.nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
    for node in file.nodes:
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own:
            yield node.attr


def _overridden(file: SourceFile) -> Iterator[str]:
    """Yield private methods of the library's classes that ours replace."""
    module = importlib.import_module(file.module)
    for kind in vars(module).values():
        if not inspect.isclass(kind) or kind.__module__ != file.module:
            continue
        theirs = [base for base in kind.__mro__ if base.__module__.startswith(_LIBRARY)]
        for name in vars(kind):
            # Every abstract class has `_abc_impl`, from Python itself.
            is_ours = _is_private(name) and name != "_abc_impl"
            if is_ours and any(name in vars(base) for base in theirs):
                yield name


def test_private_names_of_the_lake_library_are_listed_and_used_by_the_lake_alone() -> None:
    found = {
        (name, file.module)
        for file in _users()
        for name in (*_imported(file), *_looked_up(file), *_overridden(file))
    }

    assert {name for name, _ in found} == USED
    assert not [(name, user) for name, user in found if not user.startswith(_LAKE)]


@pytest.mark.parametrize("library", sorted(USED_OF_OTHERS))
def test_private_names_of_the_other_libraries_are_listed(library: str) -> None:
    ours = {name for file in library_files() for name in _defined(file)}
    users = [
        file
        for file in library_files()
        if any(name.partition(".")[0] == library for name in file.imports)
    ]

    assert users
    private = {name for file in users for name in _looked_up(file)} - ours
    imported = {
        name
        for file in users
        for node in file.nodes
        if isinstance(node, ast.ImportFrom)
        for name in (f"{node.module}.{alias.name}" for alias in node.names)
        if name.startswith(_INTERNAL_OF_OTHERS) and name.partition(".")[0] == library
    }
    assert private | imported == USED_OF_OTHERS[library]


def _defined(file: SourceFile) -> Iterator[str]:
    """Yield the names that a file gives to functions, classes, variables and attributes."""
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
