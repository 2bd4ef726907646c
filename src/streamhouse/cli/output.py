"""The JSON output of commands, and the options that filter and order their tables."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, TypeVar

import click
from rich.console import Console

__all__ = [
    "check_reader",
    "filter_option",
    "json_option",
    "largest_first",
    "matches",
    "open_console",
    "print_json",
    "print_json_line",
    "sort_option",
]

_Command = TypeVar("_Command", bound=Callable[..., Any])
_PIPE_COLUMNS: Final = 10_000

json_option = click.option("--json", "is_json", is_flag=True, help="For programs: JSON.")
filter_option = click.option(
    "--filter",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    help="Only tables whose name matches the pattern, as in 'shop.*'; may be repeated.",
)

_Figures = Mapping[str, Callable[[dict[str, Any]], float]]
"""The figures that order tables, by the figure's name in `--sort`."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # `command_group` ends a command without a reader.
        raise


def open_console() -> Console:
    """Return where a command prints tables; in a pipe or a file no column is cut."""
    here = _Console()
    if here.is_terminal or "COLUMNS" in os.environ:
        return here
    return _Console(width=_PIPE_COLUMNS)


def check_reader() -> None:
    """Raise `BrokenPipeError` if nobody reads what this process prints, as after `| head -1`.

    A command that waits for rows would else go on until the next row.
    """
    try:
        poller = select.poll()
        poller.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):
        # Not a file, as in a test.
        return
    if any(event & select.POLLERR for _, event in poller.poll(0)):
        raise BrokenPipeError


def sort_option(figures: _Figures, *, default: str = "name") -> Callable[[_Command], _Command]:
    """Return the option `--sort` of a command, by these figures."""
    return click.option(
        "--sort",
        type=click.Choice(["name", *figures]),
        default=default,
        show_default=True,
        help="By a figure: the largest first.",
    )


def print_json(document: object) -> None:
    """Print one document, with the names of the HTTP API; bytes, rows and ms are whole numbers."""
    click.echo(json.dumps(document, indent=2))


def print_json_line(document: object) -> None:
    """Print one document of several on a line."""
    click.echo(json.dumps(document))


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Return whether a table's name matches a pattern; every name matches no patterns."""
    return not patterns or any(fnmatchcase(path, pattern) for pattern in patterns)


def largest_first(
    lines: Iterable[dict[str, Any]], figure: Callable[[dict[str, Any]], float] | None
) -> list[dict[str, Any]]:
    """Order the lines of tables by a figure, the largest first; without a figure, by name."""
    return sorted(lines, key=lambda line: (-figure(line) if figure else 0, line["table"]))
