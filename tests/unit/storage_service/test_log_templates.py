"""Every line that our processes log is an event with fields, whatever module writes it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

import pytest

from streamhouse.core.log_lines import RESERVED_FIELDS, template_fields

ROOT: Final = Path(__file__).parents[3]
METHODS: Final = {"debug", "info", "warning", "error", "exception", "critical"}
LOGGERS: Final = {"_logger", "_audit"}
# What logs in our own processes; the connector logs in a user's Spark process.
FOLDERS: Final = (
    "storage_service",
    "tiering",
    "src/streamhouse/cdc_source",
    "src/streamhouse/cli",
    "src/streamhouse/core",
    "src/streamhouse/lake",
)


def _calls(path: Path) -> list[tuple[int, str]]:
    return [
        (node.lineno, ast.literal_eval(node.args[0]))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in METHODS
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in LOGGERS
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_message_is_an_event_with_fields(folder: str) -> None:
    found = 0
    for path in sorted((ROOT / folder).rglob("*.py")):
        for line, template in _calls(path):
            fields = template_fields(template)
            assert fields is not None, f"{path}:{line}: {template!r} is no event with fields"
            names = [name for name, _ in fields]
            assert len(set(names)) == len(names), f"{path}:{line} names a field twice"
            assert not set(names) & set(RESERVED_FIELDS), f"{path}:{line} has a reserved field"
            found += 1

    assert found > 1
