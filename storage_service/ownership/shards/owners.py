"""The owner of each shard, as the leases in the store say.

A lease has the owner's endpoint and, by its changes, shows that the owner lives: no decision
depends on a lease. Only a plain URL of a host and a port is followed.
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

# Callers ask many times a second, and would read the same lease each time.
_KEPT_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A shard's owner: endpoint, epoch, and whether the lease was renewed."""

    endpoint: str | None
    epoch: int
    is_live: bool


class LeaseOwners:
    """The owners of all shards of one store. Thread-safe, blocking.

    A new shard counts as live for one lease time.
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
        """Return a shard's current or last owner; None if the shard was never owned."""
        with self._lock:
            seen = self._shards.setdefault(
                shard, _Shard(LeaseWatch(lease_ms=self._lease_ms, clock=self._clock))
            )
        # Concurrent callers share a single request.
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
        """Record the watch's answer.

        Nobody takes over because of this answer, so unlike a standby all time between two looks
        counts: a caller asking once an hour must notice a dead owner at the second look.
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
