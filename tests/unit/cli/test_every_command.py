"""What every command does alike: JSON, quiet ends, suggestions, completed names of tables.

A new command that forgets one of these fails here.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

import streamhouse.cli
from streamhouse.cli import cli, run
from streamhouse.cli.command_group import READER_GONE, CommandGroup, with_flags
from streamhouse.cli.table_names import _NEW_TABLE as NEW_TABLE
from streamhouse.cli.table_names import TABLE
from streamhouse.core.errors import TableExistsError
from tests.support.canned_service import canned_service

# Commands without a document, and why.
_WITHOUT_JSON: Final = {
    "cdc follow": "runs until stopped: its lines are a log, as JSON with --log-format json",
    "completion": "a script for a shell",
    "demo": "runs until stopped, for people",
    "serve": "runs until stopped: log lines, also as JSON",
}
# Other arguments and options with these names are no tables of the service.
_NO_TABLE: Final = {"cdc follow", "tier"}
_TABLE_NAMES: Final = {"table", "tables", "path"}


def _commands() -> dict[str, click.Command]:
    commands: dict[str, click.Command] = {}
    for name in cli.list_commands(click.Context(cli)):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        commands[name] = command
        if isinstance(command, click.Group):
            commands |= {f"{name} {inner}": c for inner, c in command.commands.items()}
    return commands


COMMANDS: Final = _commands()
LEAVES: Final = {
    name: command
    for name, command in COMMANDS.items()
    if not isinstance(command, click.Group) or command.invoke_without_command
}


@pytest.mark.parametrize("name", LEAVES)
def test_every_command_that_prints_has_json(name: str) -> None:
    options = {option for parameter in LEAVES[name].params for option in parameter.opts}

    assert ("--json" in options) is (name not in _WITHOUT_JSON)


@pytest.mark.parametrize("name", LEAVES)
def test_every_name_of_a_table_is_completed(name: str) -> None:
    plain = [
        parameter.name
        for parameter in LEAVES[name].params
        if parameter.name in _TABLE_NAMES and parameter.type not in (TABLE, NEW_TABLE)
    ]

    assert not plain or name in _NO_TABLE


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in LEAVES or " " in name])
def test_every_group_names_the_nearest_command(name: str) -> None:
    group = COMMANDS[name.partition(" ")[0]]
    assert isinstance(group, CommandGroup)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["tabels"], "there is no command 'tabels'; did you mean 'tables'?"),
        (["tail", "t"], "there is no command 'tail'; did you mean 'follow'?"),
        (["rejected", "shw"], "there is no command 'shw'; did you mean 'show'?"),
        (["xyzzy"], "there is no command 'xyzzy'\n"),
    ],
)
def test_an_unknown_command_is_a_sentence(arguments: list[str], hint: str) -> None:
    done = CliRunner().invoke(cli, arguments)

    assert done.exit_code == 2
    assert hint in done.stderr


@pytest.mark.parametrize(
    ("error", "exit_code"), [(KeyboardInterrupt, 130), (BrokenPipeError, READER_GONE)]
)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_command_ends_quietly(
    error: type[BaseException], exit_code: int, depth: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every command is in such a group, and the next test says that none handles these itself."""

    def fail() -> None:
        click.echo("one line")
        raise error

    inner = click.Command("fail", callback=fail)
    group = CommandGroup("inner", commands=[inner])
    for _ in range(depth - 1):
        group = CommandGroup("outer", commands=[group])

    with pytest.raises(SystemExit) as ended:
        run(group, ["inner", "fail"][-depth:])

    assert (ended.value.code, capfd.readouterr().err.strip()) == (exit_code, "")


@pytest.mark.parametrize("arguments", [["--help"], ["tables", "--help"], ["completion", "bash"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_the_output_is_a_sentence(arguments: list[str], unbuffered: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("the system has no /dev/full")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from streamhouse.cli import main; main()", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )

    reason = "No space left on device"
    assert done.stderr == f"streamhouse: the output cannot be written: {reason}\n"
    assert done.returncode == 1


def _advised() -> set[str]:
    """Return the arguments `name=True` of the sentences of the client's errors."""
    root = Path(streamhouse.cli.__file__).parent.parent
    return {
        name
        for path in (root / "client").rglob("*.py")
        for raised in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(raised, ast.Raise)
        for node in ast.walk(raised)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for name in re.findall(r"\b([a-z_]+)=True\b", node.value)
    }


@pytest.mark.parametrize("name", sorted(_advised()))
def test_an_argument_that_the_client_advises_is_a_flag_of_a_command(name: str) -> None:
    """A new advice needs a flag of the same name, or other words."""
    commands = [c for c in LEAVES.values() if any(p.name == name for p in c.params)]

    assert commands
    for command in commands:
        flag = f"--{name.replace('_', '-')}"
        assert with_flags(f"with {name}=True it is", command) == f"with {flag} it is"


def test_the_client_advises_arguments() -> None:
    assert {"if_exists", "if_not_exists"} <= _advised()


def test_a_refusal_names_the_flag_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(**_: object) -> None:
        raise TableExistsError("with if_not_exists=True it is taken, with other=True it is not")

    inner = click.Command("make", callback=fail, params=[click.Option(["--if-not-exists"])])
    group = CommandGroup("outer", commands=[CommandGroup("inner", commands=[inner])])

    with pytest.raises(SystemExit):
        run(group, ["inner", "make"])

    message = "streamhouse: with --if-not-exists it is taken, with other=True it is not\n"
    assert capsys.readouterr().err == message


def _modules() -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted(Path(streamhouse.cli.__file__).parent.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def test_one_place_handles_an_interrupt_and_a_reader_that_has_gone() -> None:
    """A handler of a command would hide the other end from the test above."""
    handled = {
        (path.name, name.id)
        for path, tree in _modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and node.type is not None
        for name in ast.walk(node.type)
        if isinstance(name, ast.Name) and name.id in ("KeyboardInterrupt", "BrokenPipeError")
    }

    assert handled == {("command_group.py", "BrokenPipeError")}


def test_tables_are_printed_by_one_console() -> None:
    """Another one would cut names in a pipe, and end with another exit code."""
    makers = {
        path.name
        for path, tree in _modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Console"
    }

    # On stderr.
    assert makers == {"progress_bar.py"}


def _completed(*words: str, incomplete: str = "") -> list[str]:
    complete = ShellComplete(cli, {}, "streamhouse", "_STREAMHOUSE_COMPLETE")
    return [item.value for item in complete.get_completions([*words], incomplete)]


def test_names_of_tables_and_databases_come_from_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {
        "/v1/tables": {"tables": ["default.notes", "shop.orders", "shop.stock"]},
        "/v1/databases": {"databases": ["default", "shop"]},
    }
    with canned_service(answers) as url:
        monkeypatch.setenv("STREAMHOUSE_ENDPOINT", url)
        tables = ["default.notes", "shop.orders", "shop.stock", "notes"]
        assert _completed("head") == tables
        assert _completed("drop", "shop.orders", incomplete="shop.s") == ["shop.stock"]
        assert _completed("rejected", "show", incomplete="no") == ["notes"]
        assert _completed("create", incomplete="s") == ["shop."]
        assert _completed("drop", "--database", incomplete="") == ["default", "shop"]
        monkeypatch.setenv("STREAMHOUSE_ENDPOINT", "http://127.0.0.1:1")
        assert _completed("head", "--endpoint", url, incomplete="shop.o") == ["shop.orders"]


def test_without_a_service_nothing_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMHOUSE_ENDPOINT", "http://127.0.0.1:1")

    assert _completed("head", incomplete="sh") == []
