"""Lake pins of one table: promises to readers that a lake snapshot is not expired.

Invariants:
- a pin is on disk before `pin` returns, and survives a restart with its end time
- an ended pin has no effect, removed or not
- a pin belongs to the token that made the pin: only calls of the same token change or end the pin,
  so callers need not avoid each other's holder names. Pins older than tokens simply run out
- a table has at most PINS_MAX pins, and OWNER_PINS_MAX of a single token

Event loop only; disk writes go to the runtime's threads.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from streamhouse.core.errors import (
    CorruptDataError,
    InvalidRequestError,
    OverloadedError,
    StreamhouseError,
)
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.directory.state_file import StateFile

__all__ = ["LakePin", "LakePins"]

PINS_MAX: Final = 4_000
OWNER_PINS_MAX: Final = 1_000
TTL_MS_MAX: Final = 7 * 86_400_000
_HOLDER: Final = re.compile(r"[A-Za-z0-9._:@-]{1,200}")
# Owner and holder.
_Key: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LakePin:
    """`holder` reads a snapshot until `expires_timestamp_us`, unless the pin is ended earlier.

    `owner` is the name of the pinning token.
    """

    owner: str
    holder: str
    snapshot_id: int
    expires_timestamp_us: int

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form; a snapshot id is a string because it exceeds 2**53."""
        return {
            "owner": self.owner,
            "holder": self.holder,
            "snapshot_id": str(self.snapshot_id),
            "expires_timestamp_us": self.expires_timestamp_us,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LakePin:
        """Read the JSON form."""
        return cls(
            owner=str(value.get("owner", "")),
            holder=str(value["holder"]),
            snapshot_id=int(value["snapshot_id"]),
            expires_timestamp_us=int(value["expires_timestamp_us"]),
        )


class LakePins:
    """The pins of one table, by token and holder."""

    def __init__(
        self,
        file: StateFile,
        *,
        table: str,
        runtime: Runtime,
        pins_max: int = PINS_MAX,
        owner_pins_max: int = OWNER_PINS_MAX,
    ) -> None:
        """Read the pins in `file`, which may be missing: pins only preserve snapshots. Blocking."""
        self._file = file
        self._table = table
        self._runtime = runtime
        self._pins_max = pins_max
        self._owner_pins_max = owner_pins_max
        self._pins = _load(file)
        self._lock = asyncio.Lock()
        self._end: StreamhouseError | None = None

    async def end(self, error: StreamhouseError) -> None:
        """Return when no save is running, and forbid later saves: a further pin raises `error`."""
        async with self._lock:
            self._end = error

    def go_on(self) -> None:
        """Accept pins again after `end`."""
        self._end = None

    def current(self) -> list[LakePin]:
        """Return the pins that have not ended, sorted."""
        now_us = self._runtime.clock_us()
        alive = (pin for pin in self._pins.values() if pin.expires_timestamp_us > now_us)
        return sorted(alive, key=lambda pin: (pin.owner, pin.holder))

    async def pin(self, holder: str, *, owner: str, snapshot_id: int, ttl_ms: int) -> LakePin:
        """Promise `holder` the snapshot for `ttl_ms`; replaces an earlier pin of the holder.

        Holder names are separate for each owner.

        Raises:
            InvalidRequestError: the holder's name or the time is not allowed.
            OverloadedError: the table, or this owner, has too many pins.
        """
        _check_holder(holder, table=self._table)
        if not 0 < ttl_ms <= TTL_MS_MAX:
            raise InvalidRequestError(
                f"table '{self._table}': a lake pin lasts from 1 ms to {TTL_MS_MAX} ms, not"
                f" {ttl_ms}; set it again before it ends to keep it"
            )
        async with self._lock:
            pins = {(pin.owner, pin.holder): pin for pin in self.current()}
            if (owner, holder) not in pins:
                self._check_room(pins, owner)
            added = LakePin(
                owner=owner,
                holder=holder,
                snapshot_id=snapshot_id,
                expires_timestamp_us=self._runtime.clock_us() + ttl_ms * 1_000,
            )
            await self._save({**pins, (owner, holder): added})
            return added

    async def unpin(self, holder: str, *, owner: str, of_others: bool = False) -> None:
        """End the holder's pin, if any.

        With `of_others` pins of further owners are ended if `owner` has none of the name.
        """
        _check_holder(holder, table=self._table)
        async with self._lock:
            pins = {(pin.owner, pin.holder): pin for pin in self.current()}
            gone = {(owner, holder)} & pins.keys()
            if not gone and of_others:
                gone = {key for key in pins if key[1] == holder}
            if gone:
                await self._save({key: pin for key, pin in pins.items() if key not in gone})

    def _check_room(self, pins: Mapping[_Key, LakePin], owner: str) -> None:
        of_owner = sum(key[0] == owner for key in pins)
        if of_owner >= self._owner_pins_max or len(pins) >= self._pins_max:
            scope, limit = ("this token", self._owner_pins_max)
            if of_owner < self._owner_pins_max:
                scope, limit = ("all readers together", self._pins_max)
            raise OverloadedError(
                f"table '{self._table}' has its limit of {limit} lake pins of {scope}; remove one,"
                " or wait until one ends"
            )

    async def _save(self, pins: dict[_Key, LakePin]) -> None:
        if self._end is not None:
            raise type(self._end)(self._end.message)
        content = {"pins": [pin.to_json() for pin in pins.values()]}
        await self._runtime.run(self._file.save, content)
        self._pins = pins


def _check_holder(holder: str, *, table: str) -> None:
    if not _HOLDER.fullmatch(holder):
        raise InvalidRequestError(
            f"table '{table}': the holder of a lake pin is named by 1 to 200 letters, digits, '.',"
            f" '_', ':', '@' and '-', not {holder[:80]!r}"
        )


def _load(file: StateFile) -> dict[_Key, LakePin]:
    if not file.exists():
        return {}
    try:
        pins = [LakePin.from_json(value) for value in file.load()["pins"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(f"{file.path} holds no lake pins: {error!r}") from error
    return {(pin.owner, pin.holder): pin for pin in pins}
