"""Who owns each shard, as the leases in the store say.

A lease says where the owner answers and, by whether it changes, that it lives: nothing is decided
by it. What it names is followed only if it is a plain URL of a host and a port.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from streamhouse.core.errors import UnavailableError
from streamhouse.storage_service.ownership.journal.lease import LeaseWatch, SeenLease
from streamhouse.storage_service.ownership.journal.names import ShardNames
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectStore,
    ObjectStoreError,
)

__all__ = ["LeaseOwners", "Owner"]

# Who asks many times a second would read the same lease each time.
_KEPT_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who owns a shard: where it answers, under which epoch, and whether its lease was renewed."""

    endpoint: str | None
    epoch: int
    is_live: bool


class LeaseOwners:
    """The owners of all shards of one store. Thread-safe, blocking.

    A shard that is looked at for the first time counts as live for one lease time.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        lease_ms: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._lease_ms = lease_ms
        self._clock = clock
        self._lock = threading.Lock()
        self._shards: dict[str, _Shard] = {}

    def of(self, shard: str) -> Owner | None:
        """Return who owns a shard, or did last; None if nobody ever did."""
        with self._lock:
            seen = self._shards.setdefault(
                shard, _Shard(LeaseWatch(lease_ms=self._lease_ms, clock=self._clock))
            )
        # Who asks at the same time waits for the one answer.
        with seen.lock:
            if self._clock() - seen.at_s < _KEPT_S:
                return seen.owner
            asked_s = self._clock()
            try:
                seen.watch.look(self._store, ShardNames(shard))
            except ObjectStoreError as error:
                raise UnavailableError(
                    f"the lease of shard '{shard}' cannot be read: {error}"
                ) from error
            seen.take(asked_s, lease_s=self._lease_ms / 1e3)
            return seen.owner


@dataclass(slots=True)
class _Shard:
    watch: LeaseWatch
    owner: Owner | None = None
    at_s: float = float("-inf")
    changed_s: float = float("-inf")
    last: tuple[int, SeenLease | None] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, asked_s: float, *, lease_s: float) -> None:
        """Take in what the watch has seen.

        Nobody takes over because of it, so unlike a standby it counts all time between two looks:
        who is asked once an hour must see at the second look that an owner is gone.
        """
        watch, self.at_s = self.watch, asked_s
        if not watch.epoch:
            return
        if self.last != (watch.epoch, watch.lease):
            self.last, self.changed_s = (watch.epoch, watch.lease), asked_s
        lease = watch.lease
        endpoint = None if lease is None else lease.owner
        lease_s = max(lease_s, 0 if lease is None else lease.lease_ms / 1e3)
        is_live = asked_s - self.changed_s < lease_s
        self.owner = Owner(endpoint=endpoint, epoch=watch.epoch, is_live=is_live)
