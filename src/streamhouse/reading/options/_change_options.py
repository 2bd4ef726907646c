"""The options of changes in Spark's form: which versions, net changes, and updates as two changes.

The options and their values are those of Spark's `CHANGES`; a version is the time of its commit in
microseconds, so bounds by version and by time are one thing. Bounds are inclusive unless told
otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.values.positions import moment_of_version
from streamhouse.core.model.values.units import parse_boolean, parse_whole_number
from streamhouse.reading.options.connection import CHANGES, TableName

__all__ = ["CHANGE_OPTIONS", "ChangeOptions", "change_options", "time_bounds"]

CHANGE_OPTIONS: Final = (
    "startingVersion",
    "endingVersion",
    "startingBoundInclusive",
    "endingBoundInclusive",
    "deduplicationMode",
    "computeUpdates",
)
"""The options that only changes in Spark's form have."""
_NET: Final = "netchanges"
_MODES: Final = ("none", "dropCarryovers", "netChanges")
_VERSION_MAX: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class ChangeOptions:
    """`is_net`: one change a key; without `has_updates` an update is a delete and an insert."""

    has_updates: bool = True
    is_net: bool = False


def change_options(by_key: Mapping[str, str], name: TableName) -> ChangeOptions | None:
    """Return the options of changes in Spark's form, None for any other read."""
    form = by_key.get("changeformat", "").strip().lower()
    if form not in ("", "spark", "streamhouse"):
        raise InvalidRequestError(
            f"option 'changeFormat' is 'spark' or 'streamhouse', not '{by_key['changeformat']}'"
        )
    if name.part == CHANGES and form == "streamhouse":
        raise InvalidRequestError(
            f"'{name}' has changes in Spark's form; load '{name.path}$changelog' for ours"
        )
    if name.part != CHANGES and form != "spark":
        for key in CHANGE_OPTIONS:
            if key.lower() in by_key:
                raise InvalidRequestError(
                    f"option '{key}' is for changes in Spark's form: load '{name.path}${CHANGES}',"
                    " or set option 'changeFormat' to 'spark'"
                )
        return None
    mode = by_key.get("deduplicationmode", _MODES[0]).strip()
    if mode.lower() not in map(str.lower, _MODES):
        raise InvalidRequestError(
            f"option 'deduplicationMode' is {', '.join(_MODES[:-1])} or {_MODES[-1]}, not '{mode}'"
        )
    updates = by_key.get("computeupdates", "true")
    return ChangeOptions(
        has_updates=parse_boolean(updates, name="option 'computeUpdates'"),
        is_net=mode.lower() == _NET,
    )


def time_bounds(
    by_key: Mapping[str, str], from_us: int | None, to_us: int | None
) -> tuple[int | None, int | None]:
    """Return the first time, and the first time that is too late, of changes in Spark's form.

    `from_us` and `to_us` are the bounds given as times. Raises `InvalidRequestError` for bounds of
    both kinds, and for an end before the start.
    """
    first = _bound(by_key, "starting", from_us)
    last = _bound(by_key, "ending", to_us)
    if first is not None and last is not None and last < first:
        raise InvalidRequestError(
            f"the changes would end at version {last}, before they start at version {first}"
        )
    has_version = not {"startingversion", "endingversion"}.isdisjoint(by_key)
    if has_version and (from_us is not None or to_us is not None):
        raise InvalidRequestError("bound changes by versions or by times, not by both")
    if first is not None and not _is_inclusive(by_key, "starting"):
        first += 1
    if last is not None and _is_inclusive(by_key, "ending"):
        last += 1
    if has_version:
        first, last = (None if v is None else moment_of_version(v) for v in (first, last))
    return first, last


def _bound(by_key: Mapping[str, str], side: str, time_us: int | None) -> int | None:
    text = by_key.get(f"{side}version")
    if text is None:
        return time_us
    return parse_whole_number(text, name=f"option '{side}Version'", least=0, most=_VERSION_MAX)


def _is_inclusive(by_key: Mapping[str, str], side: str) -> bool:
    text = by_key.get(f"{side}boundinclusive", "true")
    return parse_boolean(text, name=f"option '{side}BoundInclusive'")
