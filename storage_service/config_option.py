"""Options of the service's configuration, described by the fields of `ServiceConfig`.

`limit`, `fixed` and `setting` make the fields. The metadata of a field is all that the command, the
settings file, the environment and the documents need.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.values.units import (
    duration_as_option,
    parse_bytes,
    parse_duration_ms,
    size_as_option,
)

__all__ = ["Kind", "Limit", "Setting", "fixed", "limit", "setting", "settings_of"]

_DIGITS_MAX = 18


class Kind(Enum):
    """How the text of a setting is read."""

    TEXT = auto()
    NUMBER = auto()
    SIZE = auto()
    FILE = auto()
    DIRECTORY = auto()
    SECRET = auto()
    """The path of a file with the value."""
    SWITCH = auto()
    """Given or not given, without a value."""
    TRUTH = auto()
    LIST = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One option that is no limit; `name` is the field of `ServiceConfig`."""

    name: str
    section: str
    flag: str
    help: str
    kind: Kind
    metavar: str | None
    choices: tuple[str, ...]
    default: Any
    """`dataclasses.MISSING` for an option that must be given."""


def setting(
    section: str,
    flag: str,
    text: str,
    *,
    default: Any = None,
    kind: Kind = Kind.TEXT,
    metavar: str | None = None,
    choices: tuple[str, ...] = (),
    is_shown: bool = True,
) -> Any:
    """Return a field with a command line option; `text` is the option's help.

    Not `is_shown`: the value is not part of the configuration's text, as it may be a secret.
    """
    metadata = {"flag": flag, "section": section, "help": text, "kind": kind}
    metadata |= {"metavar": metavar, "choices": choices}
    if default is dict:
        return field(default_factory=dict, repr=is_shown, metadata=metadata)
    return field(default=default, repr=is_shown, metadata=metadata)


def settings_of(config: type) -> list[Setting]:
    """Return the settings of a configuration class, in the order of the fields."""
    return [
        Setting(
            name=f.name,
            default=() if f.metadata["kind"] is Kind.LIST else f.default,
            **f.metadata,
        )
        for f in dataclasses.fields(config)
        if "flag" in f.metadata
    ]


def limit(section: str, default: int, unit: str, text: str) -> Any:
    """Return a field for a limit with a command line option."""
    return field(default=default, metadata={"section": section, "unit": unit, "help": text})


def fixed(default: int, unit: str, text: str) -> Any:
    """Return a field for a limit without an option."""
    return limit("", default, unit, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit: `name` is the field of `ServiceConfig`.

    `section` is the section of the command line's help; a limit without a section has no option.
    """

    section: str
    name: str
    default: int
    unit: str
    help: str

    @property
    def flag(self) -> str:
        """The command line option."""
        return "--" + self.name.replace("_", "-")

    def parse(self, text: str, *, name: str | None = None) -> int:
        """Read a plain number, a size for bytes (`64MiB`) or a duration for ms (`30s`).

        An error names the option, or `name`.
        """
        name = name or self.flag
        if text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX:
            return int(text)
        if self.unit == "bytes":
            return parse_bytes(text, name=name)
        if self.unit == "ms":
            return parse_duration_ms(text, name=name)
        raise InvalidRequestError(f"{name} = '{text}' must be a number of {self.unit}")

    def written(self, value: int) -> str:
        """Return a value in the form for people: `64MiB` instead of 67108864."""
        if self.unit == "bytes":
            return size_as_option(value)
        return duration_as_option(value) if self.unit == "ms" else str(value)
