"""The constraints of a table: names and predicates, as properties.

    table.check.<name> = <predicate>
    table.check.<name>.existing = checked (default) | not enforced

A row breaks a constraint if the predicate is FALSE; NULL passes, as in SQL. This module knows the
texts; `reading/where/checks.py` parses and judges, `storage_service` enforces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from streamhouse.core.errors import InvalidNameError, InvalidRequestError
from streamhouse.core.model.values._property_choice import property_choice

__all__ = [
    "CHECKS_MAX",
    "CHECK_PROPERTY_HELP",
    "PREDICATE_CHARACTERS_MAX",
    "CheckText",
    "check_property",
    "check_texts",
    "existing_property",
    "is_check_property",
    "is_existing_checked",
]

CHECKS_MAX: Final = 32
"""The most constraints of a table: every row is judged by each."""
PREDICATE_CHARACTERS_MAX: Final = 4_096
_PREFIX: Final = "table.check."
_KEY: Final = re.compile(r"table\.check\.(?P<name>[^.]*)(?P<existing>\.existing)?")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)

CHECK_PROPERTY_HELP: Final[dict[str, tuple[str, str]]] = {
    "table.check.<name>": (
        "",
        "A constraint: a condition in the language of `where` that must not be false for a row;"
        " see docs/constraints.md.",
    ),
    "table.check.<name>.existing": (
        "checked",
        "Adding a constraint to a table with rows: `checked` refuses a constraint which a row"
        " breaks, `not enforced` leaves existing rows alone.",
    ),
}
"""Property key -> (default, meaning); a test compares the documentation."""


class Existing(StrEnum):
    """Whether a new constraint is checked on the rows that a table has."""

    CHECKED = "checked"
    NOT_ENFORCED = "not enforced"


class CheckText(NamedTuple):
    """A constraint as written."""

    name: str
    predicate: str


def is_check_property(key: str) -> bool:
    """Whether `key` is a property of a constraint."""
    return key.startswith(_PREFIX)


def check_property(name: str) -> str:
    """Return the key of the property with the predicate of a constraint."""
    return _PREFIX + name


def existing_property(name: str) -> str:
    """Return the key of the property about the rows that a table has."""
    return f"{_PREFIX}{name}.existing"


def check_texts(properties: Mapping[str, str], *, table: str) -> tuple[CheckText, ...]:
    """Return the constraints among `properties`, by name.

    Raises for a bad name, a name without a predicate, and too many or too long constraints.
    """
    keys = [key for key in properties if is_check_property(key)]
    if not keys:
        return ()
    texts: dict[str, CheckText] = {}
    for key in keys:
        name, is_existing = _parsed(key, table=table)
        if is_existing:
            property_choice(Existing, properties, key, Existing.CHECKED, table=table)
            if check_property(name) not in properties:
                raise InvalidRequestError(
                    f"table '{table}': property {key} is set, but there is no constraint"
                    f" {check_property(name)}"
                )
            continue
        predicate = properties[key].strip()
        if len(predicate) > PREDICATE_CHARACTERS_MAX:
            raise InvalidRequestError(
                f"table '{table}': constraint '{name}' has {len(predicate)} characters; at most"
                f" {PREDICATE_CHARACTERS_MAX}"
            )
        # SQL finds constraints without case.
        other = texts.setdefault(name.lower(), CheckText(name, predicate))
        if other.name != name:
            raise InvalidNameError(
                f"table '{table}': constraints '{other.name}' and '{name}' have the same name"
            )
    if len(texts) > CHECKS_MAX:
        raise InvalidRequestError(
            f"table '{table}': {len(texts)} constraints; at most {CHECKS_MAX}, join some with AND"
        )
    return tuple(sorted(texts.values()))


def is_existing_checked(properties: Mapping[str, str], name: str, *, table: str) -> bool:
    """Whether a new constraint is checked on the rows that the table has."""
    key = existing_property(name)
    choice = property_choice(Existing, properties, key, Existing.CHECKED, table=table)
    return choice is Existing.CHECKED


def _parsed(key: str, *, table: str) -> tuple[str, bool]:
    match = _KEY.fullmatch(key)
    if match is None or not _NAME.fullmatch(match["name"]):
        raise InvalidNameError(
            f"table '{table}': property {key[:200]} names no constraint: write"
            " table.check.<name>, with a name of 1 to 128 letters, digits and underscores that"
            " does not start with a digit"
        )
    return match["name"], match["existing"] is not None
