"""What the documents say exists: links lead somewhere, and commands can be run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

import click
import pytest

from streamhouse.cli import cli
from tests.architecture.source_files import ROOT

DOCUMENTS: Final = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"))
    if not path.is_relative_to(ROOT / ".venv")
)

_FENCE: Final = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
_HEADING: Final = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_MAKE: Final = re.compile(r"(?:^|`)make ([a-z][a-z-]*)", re.MULTILINE)
_FILE: Final = re.compile(
    r"`((?:connector|storage_service|tiering|src|tests|integration|benchmarks|examples)/[\w./]*)`"
)
_INLINE: Final = re.compile(r"(?<!`)`(streamhouse [a-z][^`]*)`(?!`)")
# Lines of a shell block, or of an indented one; one that ends in a backslash goes on.
_COMMAND: Final = re.compile(r"^ *(streamhouse [a-z](?:[^\n\\]|\\\n)*)", re.MULTILINE)
# What the service prints begins like a command, too.
_PRINTED: Final = ("streamhouse listening", "streamhouse standing", "streamhouse serving")
_TARGET: Final = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)


def _anchor(heading: str) -> str:
    """The anchor that a heading gets where the repository is shown."""
    kept = re.sub(r"[^\w\- ]", "", heading.lower())
    return kept.replace(" ", "-")


def _anchors(document: Path) -> set[str]:
    return {_anchor(heading) for heading in _HEADING.findall(_FENCE.sub("", document.read_text()))}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for link in _LINK.findall(_FENCE.sub("", document.read_text())):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in _anchors(target)
        ):
            broken.append(link)

    assert not broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_targets_exist(document: Path) -> None:
    targets = set(_TARGET.findall((ROOT / "Makefile").read_text()))

    assert set(_MAKE.findall(document.read_text())) <= targets


def _left_over(line: str) -> list[str]:
    """Return what a command line has that its command does not take; raises for no command."""
    line = re.split(r" [|>&] ", line.replace("\\\n", " ").replace("...", ""))[0]
    _, name, *arguments = shlex.split(line, comments=True)
    command = cli.get_command(click.Context(cli), name)
    assert command is not None, line
    if isinstance(command, click.Group):
        # A group alone is named; `cdc URL` is `cdc follow URL`.
        if not arguments:
            return []
        is_named = arguments[0] in command.commands
        command = command.commands[arguments.pop(0) if is_named else "follow"]
    try:
        # Nothing is run, and nothing that is missing is asked for.
        return command.make_context(name, arguments, resilient_parsing=True).args
    except click.NoSuchOption as error:
        return [error.option_name]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_our_commands_take_what_they_are_given(document: Path) -> None:
    text = "" if document.name == "CHANGELOG.md" else document.read_text()
    lines = [*_INLINE.findall(_FENCE.sub("", text)), *_COMMAND.findall(text)]

    assert not {
        line: rest
        for line in lines
        if not line.startswith(_PRINTED) and not line.startswith("streamhouse config")
        if (rest := _left_over(line))
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_folders_exist(document: Path) -> None:
    # The changelog names files as they were.
    named = [] if document.name == "CHANGELOG.md" else _FILE.findall(document.read_text())

    assert not [name for name in named if not (ROOT / name).exists()]


def test_every_room_has_a_line_in_the_list_of_rooms() -> None:
    text = (ROOT / "docs" / "rooms.md").read_text()
    named = set(
        re.findall(
            r"^\| `((?:connector|storage_service|tiering|src/streamhouse)/[\w/]*)`", text, re.M
        )
    )

    rooms = {
        f"{path.parent.relative_to(ROOT)}/"
        for top in ("connector", "storage_service", "tiering", "src/streamhouse")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert named == rooms


def test_each_line_of_the_threat_model_names_a_test_that_exists() -> None:
    model = (ROOT / "docs" / "security.md").read_text().partition("## The threat model")[2]
    lines = [line for line in model.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    rows = [line for line in lines if not line.startswith(("| ---", "| attempt", "| what must"))]
    assert len(rows) > 20
    for row in rows:
        tests = re.findall(r"`((?:tests|integration)/[^`]+)`", row.rsplit("|", 2)[1])
        assert tests, row
        assert all((ROOT / test).exists() for test in tests), row
