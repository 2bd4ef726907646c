"""Groups of commands: an unknown command is refused with the nearest name.

A group also ends a command whose reader has gone, as in `streamhouse tables | head -1`: without a
message, with the exit code of a program that SIGPIPE ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, Final

import click

from streamhouse.core.errors import suggestion

__all__ = ["READER_GONE", "CommandGroup"]

READER_GONE: Final = 141
"""The exit code of a command whose reader has gone."""

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
            # Buffered text goes nowhere, or the interpreter would complain at its end.
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(READER_GONE)
        return result
