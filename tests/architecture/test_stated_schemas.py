"""Every entry of writes says by which version of a table's schema its columns are named."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLIENT_ROOMS = ("src/streamhouse", "connector", "tiering")
# Bodies whose columns are keys to look up, or that are written by a version that is known there.
READERS = {"src/streamhouse/client/reads.py", "storage_service/server/data/_key_read_route.py"}


def _callers(rooms: tuple[str, ...], name: str) -> Iterator[tuple[str, str]]:
    """Yield path and text of the modules that call a function or method."""
    for room in rooms:
        for path in sorted((ROOT / room).rglob("*.py")):
            text = path.read_text()
            calls = (node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
            names = {getattr(call, "attr", getattr(call, "id", "")) for call in calls}
            own = str(path.relative_to(ROOT))
            if name in names and own not in READERS:
                yield own, text


def test_who_sends_rows_says_the_version_that_their_columns_are_named_by() -> None:
    senders = dict(_callers(CLIENT_ROOMS, "encode_append_body"))

    assert len(senders) >= 3
    assert not [path for path, text in senders.items() if ".stated_version" not in text]


def test_who_takes_rows_reads_the_version_that_their_columns_are_named_by() -> None:
    takers = dict(_callers(("storage_service/server", "storage_service/kafka_door"), "rows_body"))

    assert len(takers) >= 3
    assert not [path for path, text in takers.items() if "written_version(" not in text]
