"""What commands print for programs, and which tables of many they show."""

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
    help="Only tables whose name is like this, as in 'shop.*'; may be repeated.",
)

_Figures = Mapping[str, Callable[[dict[str, Any]], float]]
"""By what tables are ordered, besides names: each figure of a table's line, by its name."""


def sort_option(figures: _Figures) -> Callable[[_Command], _Command]:
    """Return the option `--sort` of a command that shows these figures."""
    return click.option(
        "--sort",
        type=click.Choice(["name", *figures]),
        default="name",
        show_default=True,
        help="By a figure: the largest first.",
    )


def print_json(document: object) -> None:
    """Print one document. Names are those of the HTTP API; bytes, rows and ms are whole numbers."""
    click.echo(json.dumps(document, indent=2))


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Return whether a table's name is like one of the patterns, or there are none."""
    return not patterns or any(fnmatchcase(path, pattern) for pattern in patterns)


def largest_first(
    lines: Iterable[dict[str, Any]], figure: Callable[[dict[str, Any]], float] | None
) -> list[dict[str, Any]]:
    """Order lines of tables by a figure, the largest first; where there is none, by name."""
    return sorted(lines, key=lambda line: (-figure(line) if figure else 0, line["table"]))
