"""The JSON output of commands, and the options that filter and order their tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import click

__all__ = [
    "filter_option",
    "json_option",
    "largest_first",
    "matches",
    "print_json",
    "sort_option",
]

_Command = TypeVar("_Command", bound=Callable[..., Any])

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


def sort_option(figures: _Figures) -> Callable[[_Command], _Command]:
    """Return the option `--sort` of a command, by these figures."""
    return click.option(
        "--sort",
        type=click.Choice(["name", *figures]),
        default="name",
        show_default=True,
        help="By a figure: the largest first.",
    )


def print_json(document: object) -> None:
    """Print one document, with the names of the HTTP API; bytes, rows and ms are whole numbers."""
    click.echo(json.dumps(document, indent=2))


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Return whether a table's name matches a pattern; every name matches no patterns."""
    return not patterns or any(fnmatchcase(path, pattern) for pattern in patterns)


def largest_first(
    lines: Iterable[dict[str, Any]], figure: Callable[[dict[str, Any]], float] | None
) -> list[dict[str, Any]]:
    """Order the lines of tables by a figure, the largest first; without a figure, by name."""
    return sorted(lines, key=lambda line: (-figure(line) if figure else 0, line["table"]))
