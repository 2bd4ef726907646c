"""`--log-level` and `--log-format`, for the commands that run until stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from streamhouse.core.log_lines import LOG_FORMATS

__all__ = ["log_options"]

_F = TypeVar("_F", bound=Callable[..., Any])


def log_options(level: str) -> Callable[[_F], _F]:
    """Return a decorator: a command gets `--log-level`, by default `level`, and `--log-format`."""

    def with_options(command: _F) -> _F:
        command = click.option(
            "--log-format",
            type=click.Choice(LOG_FORMATS),
            default="text",
            show_default=True,
            help="text: key=value; json: an object a line, with the same fields.",
        )(command)
        return click.option(
            "--log-level",
            type=click.Choice(["debug", "info", "warning", "error"]),
            default=level,
            show_default=True,
            help="What is logged to stderr.",
        )(command)

    return with_options
