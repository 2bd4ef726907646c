"""The lease: when somebody else may take over, and until when an owner may answer reads.

The owner of an epoch replaces its lease object every third of `lease_ms`; nobody else writes it.
Opening the epoch counts as the first renewal. A lease holds for `lease_ms` from before the renewal
was sent, by the owner's clock. A watcher asks until it was answered the same for one lease time, by
its own clock, and then may seal the epoch, however late. Time without answers does not count.

So a lease that ran out never holds again: a watcher may have decided already. Its owner rolls
(`JournalWriter.roll`), and whoever opens the next epoch has the lease of that. From when the owner
asks the store for the next epoch, watchers may look at that one alone: renewing the lease of the
epoch before proves nothing. Hence no owner answers a read once another has taken over because of
the lease. Who takes over is decided by the journal alone.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from streamhouse.storage_service.ownership.journal.epochs import newest_epoch, read_open
from streamhouse.storage_service.ownership.journal.names import ShardNames
from streamhouse.storage_service.ownership.journal.steps import run_on
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectNotFoundError,
    ObjectStore,
    ObjectStoreError,
)

__all__ = [
    "LEASE_MS_MAX",
    "OWNER_URL",
    "LeaseKeeper",
    "LeaseWatch",
    "SeenLease",
    "read_lease",
    "renewal_timeout_s",
]

_logger = logging.getLogger(__name__)

LEASE_MS_MAX: Final = 3_600_000
OWNER_URL: Final = re.compile(r"https?://[A-Za-z0-9_.:\[\]-]{1,260}", re.ASCII)
"""What an owner may say of where it answers."""
_RENEWALS: Final = 3
# One renewal that fails, after half of the time that there is for it, is tried again so soon.
_RETRIES: Final = 4
_WARN_EVERY_S: Final = 10.0
# Clocks of two machines differ by less in how long a lease is.
_CLOCK_SHARE: Final = 0.99
_LEASE_BYTES_MAX: Final = 4 << 10


@dataclass(frozen=True, slots=True)
class SeenLease:
    """What a lease object says: `counter` grows with each renewal."""

    endpoint: str
    counter: int
    lease_ms: int

    @property
    def owner(self) -> str | None:
        """The endpoint if it is a plain URL of a host and a port: anything else is shown nobody."""
        return self.endpoint if OWNER_URL.fullmatch(self.endpoint) else None


class LeaseKeeper:
    """Renews an owner's lease on a thread of its own, until it is closed.

    `epoch` and `is_opening` are asked before each renewal, in the other order: a writer that rolls
    has a new epoch, and is opening it from before it asks the store for it until it knows that it
    has it. `opened_s` is a time of the clock before the first one was opened. `on_lapse` asks for a
    roll.
    """

    def __init__(
        self,
        store: ObjectStore,
        names: ShardNames,
        *,
        epoch: Callable[[], int],
        is_opening: Callable[[], bool],
        opened_s: float,
        on_lapse: Callable[[], None],
        endpoint: str,
        lease_ms: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert 0 < lease_ms <= LEASE_MS_MAX
        self._store = store
        self._names = names
        self._epoch = epoch
        self._is_opening = is_opening
        self._on_lapse = on_lapse
        self._endpoint = endpoint
        self._lease_ms = lease_ms
        self._clock = clock
        self._counter = 0
        self._renewed_epoch = epoch()
        # When the next epoch was not asked for, for sure.
        self._looked_s = opened_s
        self._valid_until_s = self._until(opened_s)
        self._pause_s = 0.0
        self._warns_s = float("-inf")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="journal-lease", daemon=True)

    @property
    def is_valid(self) -> bool:
        """Whether nobody has taken over because of the lease, up to now."""
        return self._clock() < self._valid_until_s

    @property
    def valid_ms(self) -> float:
        """For how long the lease holds, as of now; not above 0 if it does not."""
        return 1e3 * (self._valid_until_s - self._clock())

    def start(self) -> None:
        """Renew from now on. The first time may fail: opening the epoch was a renewal."""
        self._try()
        self._thread.start()

    def renew(self) -> None:
        """Renew once. Raises what the store raises; whether it is renewed is not known then."""
        sent_s = self._clock()
        is_opening = self._is_opening()
        if (epoch := self._epoch()) != self._renewed_epoch:
            # It was opened after the last look, which counts as its first renewal.
            self._renewed_epoch = epoch
            self._valid_until_s = max(self._valid_until_s, self._until(self._looked_s))
        if not is_opening:
            self._looked_s = sent_s
        self._counter += 1
        lease = {
            "counter": self._counter,
            "endpoint": self._endpoint,
            "lease_ms": self._lease_ms,
        }
        self._store.replace(self._names.lease(epoch), json.dumps(lease).encode())
        if is_opening:
            # For those who have not seen the next epoch: they need not take over.
            return
        if self.is_valid:
            self._valid_until_s = self._until(sent_s)
        else:
            _logger.warning("event=lease_ran_out epoch=%d", epoch)
            self._on_lapse()

    def close(self) -> None:
        """Renew no more; the lease runs out."""
        self._is_over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _until(self, sent_s: float) -> float:
        return sent_s + _CLOCK_SHARE * self._lease_ms / 1e3

    def _keep(self) -> None:
        while not self._is_over.wait(self._pause_s):
            self._try()

    def _try(self) -> None:
        started_s = time.monotonic()
        every_s = self._lease_ms / 1e3 / _RENEWALS
        try:
            self.renew()
            self._pause_s = max(every_s - (time.monotonic() - started_s), 0.0)
        except ObjectStoreError as error:
            if started_s >= self._warns_s:
                # A store may be away for hours, and is asked several times a second.
                self._warns_s = started_s + _WARN_EVERY_S
                _logger.warning("event=lease_not_renewed error='%s'", error)
            self._pause_s = every_s / _RETRIES


class LeaseWatch:
    """Says when the lease of the newest epoch has run out, by the watcher's own clock alone.

    What the store answers is given to `seen`, again and again; the owner lives while it changes.
    Between two answers only so much time counts as an owner takes to renew: while the store is away
    nobody can, and when it is back all owners would be taken for dead at once.
    """

    def __init__(self, *, lease_ms: int, clock: Callable[[], float] = time.monotonic) -> None:
        assert 0 < lease_ms <= LEASE_MS_MAX
        self._own_ms = lease_ms
        self._clock = clock
        self._last: tuple[int, SeenLease | None] | None = None
        self._owner_ms = 0
        self._since_s = 0.0
        self._asked_s = 0.0

    def look(self, store: ObjectStore, names: ShardNames) -> None:
        """Ask the store for the newest epoch and its lease. Raises what the store raises."""
        asked_s = self._clock()
        epoch = run_on(store, newest_epoch(names, at_least=self.epoch))
        if not epoch:
            return
        if epoch != self.epoch:
            self._owner_ms = run_on(store, read_open(names, epoch)).lease_ms
        lease = read_lease(store, names, epoch)
        self.seen(epoch, lease, asked_s=asked_s, owner_ms=self._owner_ms)

    def seen(self, epoch: int, lease: SeenLease | None, *, asked_s: float, owner_ms: int) -> None:
        """Take note of the newest epoch and its lease, asked for at that time of the clock.

        `owner_ms` is the lease time that its open object names.
        """
        self._owner_ms = owner_ms
        if self._last != (epoch, lease):
            # It may have changed at any time before the answer, not only before the question.
            self._last, self._since_s = (epoch, lease), self._clock()
        else:
            counted_s = self._lease_ms / 1e3 / _RENEWALS
            self._since_s += max(0.0, asked_s - self._asked_s - counted_s)
        self._asked_s = max(asked_s, self._since_s)

    @property
    def epoch(self) -> int:
        """The newest epoch that was seen; 0 if there was none."""
        return self._last[0] if self._last else 0

    @property
    def lease(self) -> SeenLease | None:
        """What its lease said."""
        return self._last[1] if self._last else None

    @property
    def remaining_ms(self) -> float:
        """For how long the owner may live after the last question; not above 0: no longer.

        An owner's lease time is believed up to an hour, and counts if it is the longer one.
        """
        return self._lease_ms - 1e3 * (self._asked_s - self._since_s)

    @property
    def has_run_out(self) -> bool:
        """Whether the lease was the same for a whole lease time."""
        return self._last is not None and self.remaining_ms <= 0

    @property
    def _lease_ms(self) -> int:
        return max(self._own_ms, min(self._owner_ms, LEASE_MS_MAX))


def renewal_timeout_s(lease_ms: int) -> float:
    """Return when a renewal is given up: there must be time for another, on another connection."""
    return lease_ms / 1e3 / _RENEWALS / 2


def read_lease(store: ObjectStore, names: ShardNames, epoch: int) -> SeenLease | None:
    """Return what the lease of an epoch says; None if there is none, or none that makes sense.

    The endpoint is what somebody wrote there: it is for messages. Raises what the store raises.
    """
    try:
        data = store.get(names.lease(epoch), bytes_max=_LEASE_BYTES_MAX)
    except ObjectNotFoundError:
        return None
    try:
        content = json.loads(bytes(data))
        endpoint, counter, lease_ms = (
            content[name] for name in ("endpoint", "counter", "lease_ms")
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(endpoint, str) or type(counter) is not int or type(lease_ms) is not int:
        return None
    return SeenLease(endpoint, counter, lease_ms) if 0 < lease_ms <= LEASE_MS_MAX else None
