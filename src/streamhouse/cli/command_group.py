"""Groups of commands: an unknown command is refused with the nearest name.

A refusal that advises an argument of Python names the command's flag instead.

A group also ends a command whose reader has gone, as in `streamhouse tables | head -1`: without a
message, with the exit code of a program that SIGPIPE ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import Any, Final

import click

from streamhouse.cli.settings import flag_of
from streamhouse.core.errors import StreamhouseError, suggestion

__all__ = ["READER_GONE", "CommandGroup", "discard_output", "is_output_lost", "with_flags"]

READER_GONE: Final = 141
"""The exit code of a command whose reader has gone."""

_SWITCH: Final = re.compile(r"\b([a-z_]+)=True\b")
# The names of the same commands in other tools.
_SYNONYMS: Final = {
    "cat": "head",
    "copy": "load",
    "delete": "drop",
    "desc": "tables",
    "describe": "tables",
    "insert": "load",
    "list": "tables",
    "ls": "tables",
    "quickstart": "demo",
    "rm": "drop",
    "run": "serve",
    "select": "query",
    "server": "serve",
    "show": "tables",
    "sql": "query",
    "start": "serve",
    "status": "top",
    "subscribe": "follow",
    "tail": "follow",
    "watch": "top",
}


class CommandGroup(click.Group):
    """See the module. Every group of the command line is one of these."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command to run; raises `click.UsageError` for an unknown command."""
        name, names = args[0], self.list_commands(ctx)
        if not ctx.resilient_parsing and name not in names and not name.startswith("-"):
            synonym = _SYNONYMS.get(name)
            hint = f"; did you mean '{synonym}'?" if synonym in names else suggestion(name, names)
            raise click.UsageError(f"there is no command '{name}'{hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command of the arguments."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            discard_output()
            ctx.exit(READER_GONE)
        except StreamhouseError as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            if command is not None:
                error.message = with_flags(error.message, command)
                error.args = (error.message,)
            raise
        return result


def with_flags(message: str, command: click.Command) -> str:
    """Return a message of the client with `if_exists=True` as the command's `--if-exists`."""
    flags = {
        parameter.name: flag_of(parameter)
        for parameter in command.params
        if isinstance(parameter, click.Option)
    }
    return _SWITCH.sub(lambda match: flags.get(match[1], match[0]), message)


def is_output_lost() -> bool:
    """Return whether stdout takes no more text, as on a full disk: an end of a line is written."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def discard_output() -> None:
    """Let buffered text go nowhere, or the interpreter would complain at its end."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
