"""A protocol of ours has several implementations, or a reason that is listed here.

A protocol with one implementation is a second description of a class: callers name the class. The
implementations are the library's classes with all members of the protocol; a double of the tests
does not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from tests.architecture.source_files import library_files

_CALLABLE: Final = "__call__"

REASONS: Final = {
    # The right import direction, which a contract of setup.cfg demands.
    "_Client of _log_source.py": "StorageClient stands on `following`",
    "_Client of replay.py": "StorageClient stands on `writing`",
    "RejectsClient": "StorageClient stands on `writing`",
    "ReportsPositions": "StorageClient stands on `positions`",
    "ServedTables": "`lake` is a library of the service, whose server has the tables",
    "Observer": "the metrics of the server stand on the data directory",
    "TableReads": "StorageClient, and the service for its own log, which stands above `reading`",
    "Adoptable": "the engine knows no lake",
    "Links": "the coordinator of transactions stands on the commit of each table",
    "Client": "KafkaConnection of the Kafka door stands on the exchange of a request",
    "ShardCaller": "KafkaExchange stands on the broker, whose groups call other shards",
    "Bucket": "KvTablet stands on the plans of its writes",
    "Connection of http_exchange.py": "the HTTP protocol stands on the exchange of a request",
    "Tenure": "`server/http` knows no roles",
    # Objects of a library.
    "_StreamExporter": "Arrow's PyCapsule interface",
    "_ArrayExporter": "Arrow's PyCapsule interface",
    "_FrameExporter": "the DataFrame interchange protocol",
    "_Readable": "any binary file",
}


def test_ports() -> None:
    """Every port with at most one implementation has a reason, and each reason a port."""
    has_one = dict(_ports())
    assert sorted(port for port in has_one if has_one[port] and port not in REASONS) == []
    assert sorted(REASONS.keys() - has_one.keys()) == []


def _ports() -> Iterator[tuple[str, bool]]:
    """Yield each port, and whether at most one class has the names of its members."""
    files = library_files()
    classes = {
        (file.path.name, node.name): node
        for file in files
        for node in file.nodes
        if isinstance(node, ast.ClassDef)
    }
    by_name = {name: node for (_, name), node in classes.items()}
    ports = {key: node for key, node in classes.items() if "Protocol" in _bases(node)}
    members = [_members(n, by_name) for key, n in classes.items() if key not in ports]
    names = [name for _, name in ports]
    for (file_name, name), port in ports.items():
        needed = _members(port, by_name)
        has_one = _CALLABLE not in needed and sum(needed <= have for have in members) < 2
        yield f"{name} of {file_name}" if names.count(name) > 1 else name, has_one


def _bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base) for base in node.bases]


def _members(node: ast.ClassDef, by_name: dict[str, ast.ClassDef]) -> set[str]:
    """Return the names of methods and attributes, inherited ones included."""
    members = set[str]()
    for part in ast.walk(node):
        match part:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                members.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                members.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                members.add(name)
    for base in _bases(node):
        if base in by_name and by_name[base] is not node:
            members |= _members(by_name[base], by_name)
    return members
