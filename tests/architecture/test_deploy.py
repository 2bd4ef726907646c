"""What deploy/ starts exists: every option of every command line in it."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Final

import pytest

from tests.architecture.source_files import ROOT

FILES: Final = sorted(path for path in (ROOT / "deploy").rglob("*") if path.is_file())

# A unit's `streamhouse serve ...`, lines continued; a manifest's `command: [streamhouse, serve]`.
_SHELL: Final = re.compile(r"streamhouse (\w+) ((?:[^\n\\]|\\\n)*)")
_MANIFEST: Final = re.compile(
    r"command: \[streamhouse, (\w+)\]\n +args:\n((?: +(?:- |#)[^\n]*\n)+)"
)
_OPTION: Final = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def _commands(text: str) -> list[tuple[str, list[str]]]:
    without_comments = re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE)
    found = [*_SHELL.findall(without_comments), *_MANIFEST.findall(without_comments)]
    return [(name, _OPTION.findall(rest)) for name, rest in found]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_its_commands_and_options_exist(path: Path) -> None:
    commands = _commands(path.read_text())

    assert commands or path.suffix not in {".service", ".yaml"}
    for name, options in commands:
        command = importlib.import_module(f"streamhouse.cli.{name}").command
        known = {option for parameter in command.params for option in parameter.opts}
        assert options
        assert set(options) <= known, name


def test_there_is_something_to_deploy() -> None:
    assert FILES


def test_alerts_are_of_metrics_that_are_documented() -> None:
    alerts = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    operations = (ROOT / "docs" / "operations.md").read_text()

    names = set(re.findall(r"streamhouse_\w+", alerts))

    assert len(names) > 5
    assert names <= set(re.findall(r"^\| `(streamhouse_\w+)` \|", operations, re.MULTILINE))
