"""Sizes and durations in the form that options take and commands print."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from streamhouse.cli.settings import flag_of, variables_of
from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.values.units import parse_bytes, parse_duration_ms

__all__ = ["SIZE", "MeasureType", "age_text", "parse_pause_s", "size_text"]

_STEP: Final = 1024
_PAUSE_S_MIN: Final = 0.1
_SECONDS: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)


if TYPE_CHECKING:
    _TextType = click.ParamType[str]
else:
    # Not generic in older versions of click.
    _TextType = click.ParamType


class MeasureType(_TextType):
    """A size, a duration or a number, kept in the written form after the check.

    The command line, the environment and the file share the parser. Its message names the option or
    the variable; the reader of the file adds the file's name.
    """

    def __init__(self, name: str, parse: Callable[..., Any]) -> None:
        """Check by `parse(text, name=...)`."""
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text; raises `click.UsageError`, as click does for an unknown option."""
        text = str(value)
        try:
            self._parse(text, name=_value_name(param, ctx))
        except InvalidRequestError as error:
            raise click.UsageError(error.message, ctx) from error
        return text


def _value_name(param: click.Parameter | None, ctx: click.Context | None) -> str:
    if not isinstance(param, click.Option) or param.name is None:
        return "the value"
    if ctx is not None and ctx.get_parameter_source(param.name) is ParameterSource.ENVIRONMENT:
        variable = next((name for name in variables_of(param) if os.environ.get(name)), None)
        return f"the variable {variable}" if variable else flag_of(param)
    return flag_of(param)


def parse_pause_s(text: str, *, name: str) -> float:
    """Read `10s` or `5m` as seconds; a bare number is seconds, and may have a fraction."""
    if _SECONDS.fullmatch(text.strip()):
        pause_s = float(text)
    else:
        pause_s = parse_duration_ms(text, name=name) / 1_000
    if pause_s < _PAUSE_S_MIN:
        raise InvalidRequestError(f"{name} = '{text}' must be at least 100ms")
    return pause_s


SIZE: Final = MeasureType("size", parse_bytes)


def size_text(size: float) -> str:
    """Return bytes for people, as in `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < _STEP:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= _STEP
    return f"{size:,.1f} TiB"


def age_text(duration_ms: float) -> str:
    """Return a duration for people, as in `1.5 s` or `3 h`."""
    for unit, unit_ms in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000)):
        if duration_ms >= 2 * unit_ms:
            return f"{duration_ms / unit_ms:,.0f} {unit}"
    return f"{duration_ms:.0f} ms" if duration_ms < 1_000 else f"{duration_ms / 1_000:.1f} s"
