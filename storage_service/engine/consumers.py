"""The positions of one table's readers: the offsets that each consumer last reported.

Invariants:
- a consumer belongs to the token that reports the consumer; two tokens may use the same name
- a consumer without a report within the table's `table.log.consumers.ttl` is ignored
- a table has at most CONSUMERS_MAX consumers, and OWNER_CONSUMERS_MAX of a single token
- a new consumer is on disk before `report` returns, as is a report with `is_durable`; later reports
  follow soon. After a crash a consumer is at most SAVE_MS behind: the service keeps too much, never
  too little

Event loop only; disk writes go to the runtime's threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from streamhouse.core.errors import (
    ConsumerLimitError,
    CorruptDataError,
    StreamhouseError,
)
from streamhouse.core.model.offsets import buckets_to_json, offsets_from_json
from streamhouse.core.model.values.consumer_names import (
    check_consumer_name,
)
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.directory.state_file import StateFile

__all__ = ["Consumer", "ConsumerKey", "Consumers"]

_logger = logging.getLogger(__name__)

CONSUMERS_MAX: Final = 200
OWNER_CONSUMERS_MAX: Final = 100
SAVE_MS: Final = 10_000
_SAVE_UNMOVED_MS: Final = 600_000

ConsumerKey: TypeAlias = tuple[str, str]
"""Owner and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """A reader that has read every row below `offsets`, bucket by bucket.

    `owner` is the name of the reporting token. A consumer with `reads_lake` reads rows from the
    lake once the rows have left the log.
    """

    owner: str
    name: str
    offsets: Mapping[int, int]
    reported_us: int
    reads_lake: bool = False

    @property
    def key(self) -> ConsumerKey:
        """The identity among the consumers of the table."""
        return (self.owner, self.name)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "owner": self.owner,
            "name": self.name,
            "offsets": buckets_to_json(self.offsets),
            "reported_us": self.reported_us,
            "reads_lake": self.reads_lake,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Consumer:
        """Read the JSON form."""
        return cls(
            owner=str(value["owner"]),
            name=str(value["name"]),
            offsets=offsets_from_json(value["offsets"]),
            reported_us=int(value["reported_us"]),
            reads_lake=bool(value["reads_lake"]),
        )


class Consumers:
    """The consumers of one table."""

    def __init__(
        self,
        file: StateFile,
        *,
        table: str,
        runtime: Runtime,
        consumers_max: int = CONSUMERS_MAX,
        owner_consumers_max: int = OWNER_CONSUMERS_MAX,
    ) -> None:
        """Read the consumers in `file`, which may be missing. Blocking.

        A damaged file is logged and its consumers are forgotten: the readers report again.
        """
        self._file = file
        self._table = table
        self._runtime = runtime
        self._consumers_max = consumers_max
        self._owner_consumers_max = owner_consumers_max
        self._consumers = _load(file, table)
        self._saved = dict(self._consumers)
        self._saved_us = 0
        self._changes = 0
        self._changes_saved = 0
        self._is_saved_known = True
        self._lock = asyncio.Lock()
        self._end: StreamhouseError | None = None
        self.written_us: dict[tuple[int, int], int] = {}
        """When the first row was written that a consumer has not read, by bucket and offset."""
        self.rows_at_risk: dict[ConsumerKey, int] = {}
        """Unread rows that retention takes soon, as it found them last."""

    async def end(self, error: StreamhouseError) -> None:
        """Return when no save is running, and forbid later saves: later reports raise `error`."""
        async with self._lock:
            self._end = error

    def go_on(self) -> None:
        """Accept reports again after `end`."""
        self._end = None

    def current(self, ttl_ms: int) -> list[Consumer]:
        """Return the consumers with a report within `ttl_ms`, sorted."""
        if not self._consumers:
            return []
        oldest_us = self._runtime.clock_us() - ttl_ms * 1_000
        alive = (one for one in self._consumers.values() if one.reported_us > oldest_us)
        return sorted(alive, key=lambda consumer: consumer.key)

    async def report(
        self,
        name: str,
        *,
        owner: str,
        offsets: Mapping[int, int],
        reads_lake: bool,
        ttl_ms: int,
        is_durable: bool = False,
        is_part: bool = False,
    ) -> Consumer:
        """Note that the consumer has read every row below `offsets`; on disk if `is_durable`.

        Buckets missing from `offsets` keep their last reported offsets.

        Raises:
            InvalidRequestError: the name is not allowed.
            ConsumerLimitError: the table, or this owner, has too many consumers.
        """
        check_consumer_name(name, table=self._table)
        self._check_not_ended()
        current = {consumer.key: consumer for consumer in self.current(ttl_ms)}
        previous = current.get((owner, name))
        if previous is None:
            self._check_room(current, owner)
        kept_offsets = previous.offsets if is_part and previous is not None else {}
        said = Consumer(
            owner=owner,
            name=name,
            offsets={**kept_offsets, **offsets},
            reported_us=self._runtime.clock_us(),
            reads_lake=reads_lake,
        )
        self._change({**current, said.key: said})
        saved = self._saved.get(said.key)
        is_behind = not self._is_saved_known or saved is None or saved.offsets != said.offsets
        if previous is None or saved is None or (is_durable and is_behind) or self._is_due():
            await self._save_since(self._changes)
        return said

    def find(self, name: str, *, owner: str, ttl_ms: int) -> Consumer | None:
        """Return the consumer of this name with a report within `ttl_ms`."""
        consumer = self._consumers.get((owner, name))
        oldest_us = self._runtime.clock_us() - ttl_ms * 1_000
        return consumer if consumer is not None and consumer.reported_us > oldest_us else None

    async def forget(self, name: str, *, owner: str, of_others: bool = False) -> None:
        """Forget the owner's consumer of this name, if any.

        With `of_others` consumers of further owners are forgotten if `owner` has none of the name.
        """
        async with self._lock:
            self._check_not_ended()
            gone = {(owner, name)} & self._consumers.keys()
            if not gone and of_others:
                gone = {key for key in self._consumers if key[1] == name}
            if gone:
                self._change(
                    {k: consumer for k, consumer in self._consumers.items() if k not in gone}
                )
                await self._save()

    async def save(self, *, is_last: bool = False) -> None:
        """Save new reports if a save is due, or all unsaved reports with `is_last`."""
        if self._consumers == self._saved:
            return
        async with self._lock:
            if self._end is None and (is_last or self._is_due()):
                await self._save()

    def _change(self, consumers: dict[ConsumerKey, Consumer]) -> None:
        self._consumers = consumers
        self._changes += 1

    async def _save_since(self, change: int) -> None:
        """Return when this change is on disk: waiting callers share the next save."""
        async with self._lock:
            self._check_not_ended()
            if self._changes_saved < change:
                await self._save()

    def _check_not_ended(self) -> None:
        if self._end is not None:
            raise type(self._end)(self._end.message)

    def _check_room(self, known: Mapping[ConsumerKey, Consumer], owner: str) -> None:
        of_owner = sum(key[0] == owner for key in known)
        if of_owner >= self._owner_consumers_max or len(known) >= self._consumers_max:
            scope, limit = "this token", self._owner_consumers_max
            if of_owner < self._owner_consumers_max:
                scope, limit = "all tokens together", self._consumers_max
            raise ConsumerLimitError(
                f"table '{self._table}' has its limit of {limit} consumers of {scope}; forget one"
                " with 'streamhouse consumers --forget'"
            )

    def _is_due(self) -> bool:
        """Whether new reports are to be saved now: less often if no offset has moved."""
        age_ms = (self._runtime.clock_us() - self._saved_us) / 1_000
        if age_ms < SAVE_MS:
            return False
        offsets = {key: consumer.offsets for key, consumer in self._consumers.items()}
        saved_offsets = {key: consumer.offsets for key, consumer in self._saved.items()}
        return offsets != saved_offsets or age_ms >= _SAVE_UNMOVED_MS

    async def _save(self) -> None:
        consumers, changes = self._consumers, self._changes
        content = {"consumers": [one.to_json() for _, one in sorted(consumers.items())]}
        # While it is being saved, or after that failed, the file may have either.
        self._is_saved_known = False
        await self._runtime.run(self._file.save, content)
        self._is_saved_known = True
        self._saved, self._saved_us = consumers, self._runtime.clock_us()
        self._changes_saved = changes


def _load(file: StateFile, table: str) -> dict[ConsumerKey, Consumer]:
    if not file.exists():
        return {}
    try:
        stored = [Consumer.from_json(value) for value in file.load()["consumers"]]
    except (CorruptDataError, KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CorruptDataError) and file.is_of_another_format():
            raise
        _logger.error("event=consumers_lost table=%s why=%r", table, str(error))
        return {}
    return {consumer.key: consumer for consumer in stored}
