"""The messages of `docs/troubleshooting.md` are messages of the product."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from tests.architecture.source_files import ROOT, library_files

_ROW: Final = re.compile(r"^\| (?!message|---)([^|]*`[^|]*) \|", re.MULTILINE)
_PIECE: Final = re.compile(r"`([^`]+)`")
# Spark's and Python's own messages.
_FOREIGN: Final = {
    'Failed to download extension "iceberg"',
    "DATA_SOURCE_NOT_FOUND",
    "Failed to find the data source: streamhouse",
    "ModuleNotFoundError: No module named 'streamhouse'",
    "UNSUPPORTED_DATA_SOURCE_SAVE_MODE",
    "Catalog spark_catalog does not support …",
    "TABLE_OR_VIEW_NOT_FOUND",
}


def _texts() -> Iterator[str]:
    """Yield the texts of the product, with an ellipsis for each value inside."""
    for file in library_files():
        for node in file.nodes:
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_each_message_is_one_of_the_product() -> None:
    document = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = [piece for row in _ROW.findall(document) for piece in _PIECE.findall(row)]
    assert len(messages) > 20

    text = "\n".join(_texts())
    strangers = [
        message
        for message in messages
        if message not in _FOREIGN
        and not re.search(".*".join(map(re.escape, message.split("…"))), text)
    ]
    assert not strangers
