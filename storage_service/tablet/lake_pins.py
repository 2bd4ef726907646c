"""Lake pins of one table: promises to readers that a lake snapshot is not expired.

Invariants:
- a pin is on disk before `pin` returns, and survives a restart with the time it ends
- a pin that has ended counts for nothing, whether it was removed or not
- a table has at most PINS_MAX pins
Event loop only; disk writes go to `run_blocking`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from streamhouse.storage_service.errors import (
    CorruptDataError,
    InvalidRequestError,
    OverloadedError,
)
from streamhouse.storage_service.tablet.blocking import RunBlocking
from streamhouse.storage_service.tablet.durable_json import read_json, replace_json

__all__ = ["LakePin", "LakePins"]

PINS_MAX: Final = 1_000
TTL_MS_MAX: Final = 7 * 86_400_000
_HOLDER: Final = re.compile(r"[A-Za-z0-9._:@-]{1,200}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LakePin:
    """`holder` reads a snapshot until `expires_timestamp_us`, or until it says otherwise."""

    holder: str
    snapshot_id: int
    expires_timestamp_us: int

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form; a snapshot id is a string because it exceeds 2**53."""
        return {
            "holder": self.holder,
            "snapshot_id": str(self.snapshot_id),
            "expires_timestamp_us": self.expires_timestamp_us,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LakePin:
        """Read the JSON form."""
        return cls(
            holder=str(value["holder"]),
            snapshot_id=int(value["snapshot_id"]),
            expires_timestamp_us=int(value["expires_timestamp_us"]),
        )


class LakePins:
    """The pins of one table, one a holder."""

    def __init__(
        self,
        file: Path,
        *,
        table: str,
        run_blocking: RunBlocking,
        clock_us: Callable[[], int],
    ) -> None:
        """Read the pins in `file`; it need not exist. Blocking."""
        self._file = file
        self._table = table
        self._run_blocking = run_blocking
        self._clock_us = clock_us
        self._pins = _load(file)
        self._lock = asyncio.Lock()

    def current(self) -> list[LakePin]:
        """Return the pins that have not ended, sorted by holder."""
        now_us = self._clock_us()
        alive = (pin for pin in self._pins.values() if pin.expires_timestamp_us > now_us)
        return sorted(alive, key=lambda pin: pin.holder)

    async def pin(self, holder: str, *, snapshot_id: int, ttl_ms: int) -> LakePin:
        """Promise `holder` the snapshot for `ttl_ms`; replaces the holder's pin, if it has one.

        Raises:
            InvalidRequestError: the holder's name or the time is not a possible one.
            OverloadedError: the table has as many pins as it may have.
        """
        _check_holder(holder, table=self._table)
        if not 0 < ttl_ms <= TTL_MS_MAX:
            raise InvalidRequestError(
                f"table '{self._table}': a lake pin lasts from 1 ms to {TTL_MS_MAX} ms, not"
                f" {ttl_ms}; set it again before it ends to keep it"
            )
        async with self._lock:
            pins = {pin.holder: pin for pin in self.current()}
            if holder not in pins and len(pins) >= PINS_MAX:
                raise OverloadedError(
                    f"table '{self._table}' has its limit of {PINS_MAX} lake pins; remove one, or"
                    " wait until one ends"
                )
            added = LakePin(
                holder=holder,
                snapshot_id=snapshot_id,
                expires_timestamp_us=self._clock_us() + ttl_ms * 1_000,
            )
            await self._save({**pins, holder: added})
            return added

    async def unpin(self, holder: str) -> None:
        """End the holder's pin; having none is fine."""
        _check_holder(holder, table=self._table)
        async with self._lock:
            if holder in self._pins:
                await self._save({p.holder: p for p in self.current() if p.holder != holder})

    async def _save(self, pins: dict[str, LakePin]) -> None:
        content = {"pins": [pin.to_json() for pin in pins.values()]}
        await self._run_blocking(replace_json, self._file, content)
        self._pins = pins


def _check_holder(holder: str, *, table: str) -> None:
    if not _HOLDER.fullmatch(holder):
        raise InvalidRequestError(
            f"table '{table}': the holder of a lake pin is named by 1 to 200 letters, digits, '.',"
            f" '_', ':', '@' and '-', not {holder[:80]!r}"
        )


def _load(file: Path) -> dict[str, LakePin]:
    if not file.exists():
        return {}
    try:
        pins = [LakePin.from_json(value) for value in read_json(file)["pins"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(f"{file} holds no lake pins: {error}") from error
    return {pin.holder: pin for pin in pins}
