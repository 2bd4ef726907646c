"""The lease: when another process may take over, and until when an owner may answer reads.

The owner of an epoch replaces its lease object every third of `lease_ms`; only the owner writes the
object. Opening the epoch counts as the first renewal. A lease holds for `lease_ms` from before the
renewal was sent, by the owner's clock. A watcher may seal the epoch once all answers were equal for
one lease time by its own clock, however late. Time without answers does not count.

An expired lease never holds again, because a watcher may have decided already. The owner rolls
(`JournalWriter.roll`), and the process opening the next epoch has the next lease. From the owner's
request for the next epoch on, watchers may look at the next epoch alone: renewing the old lease
proves nothing. Hence no owner answers a read after a takeover caused by its lease. The journal
alone decides who takes over.
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

from streamhouse.core.threads import NamedThread
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
"""The form of an owner's endpoint."""
_RENEWALS: Final = 3
# A renewal fails after half of its period; the retry follows after this part of the period.
_RETRIES: Final = 4
_WARN_EVERY_S: Final = 10.0
# Clocks of two machines disagree by less than this share over one lease.
_CLOCK_SHARE: Final = 0.99
_LEASE_BYTES_MAX: Final = 4 << 10


@dataclass(frozen=True, slots=True)
class SeenLease:
    """A lease object's content: `counter` grows with each renewal."""

    endpoint: str
    counter: int
    lease_ms: int

    @property
    def owner(self) -> str | None:
        """The endpoint if it is a plain URL of a host and a port; None hides anything else."""
        return self.endpoint if OWNER_URL.fullmatch(self.endpoint) else None


class LeaseKeeper:
    """Renews an owner's lease on a thread of its own, until `close`.

    Before each renewal `is_opening` is called, then `epoch`: a rolling writer reports `is_opening`
    from before its request to the store until the answer. `opened_s` is a time of the clock before
    the first epoch was opened. `on_lapse` asks for a roll.
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
        # The last time known to be before a request for the next epoch.
        self._looked_s = opened_s
        self._valid_until_s = self._until(opened_s)
        self._pause_s = 0.0
        self._warns_s = float("-inf")
        self._is_over = threading.Event()
        self._thread = NamedThread("journal-lease", self._keep)

    @property
    def is_valid(self) -> bool:
        """Whether no takeover because of the lease is possible up to now."""
        return self._clock() < self._valid_until_s

    @property
    def valid_until_s(self) -> float:
        """The time of the clock at which the lease ends, if nothing renews it."""
        return self._valid_until_s

    @property
    def valid_ms(self) -> float:
        """The remaining time of the lease; not above 0 after its end."""
        return 1e3 * (self._valid_until_s - self._clock())

    def start(self) -> None:
        """Start renewals. The first renewal may fail: opening the epoch was a renewal."""
        self._try()
        self._thread.start()

    def renew(self) -> None:
        """Renew once. Raises store errors; the outcome of the renewal is unknown after an error."""
        sent_s = self._clock()
        is_opening = self._is_opening()
        if (epoch := self._epoch()) != self._renewed_epoch:
            # The epoch was opened after the last look, and opening counts as the first renewal.
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
            # For watchers without sight of the next epoch: no takeover is needed.
            return
        if self.is_valid:
            self._valid_until_s = self._until(sent_s)
        else:
            _logger.warning("event=lease_ran_out epoch=%d", epoch)
            self._on_lapse()

    def close(self) -> None:
        """Stop renewals; the lease expires."""
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
    """Decides when the lease of the newest epoch has expired, by the watcher's own clock alone.

    `seen` gets each answer of the store; the owner lives while answers change. Between two answers
    at most one renewal period counts: without the store nobody can renew, and after an outage all
    owners would look dead at once.
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
        """Read the newest epoch and its lease. Raises store errors."""
        asked_s = self._clock()
        epoch = run_on(store, newest_epoch(names, at_least=self.epoch))
        if not epoch:
            return
        if epoch != self.epoch:
            self._owner_ms = run_on(store, read_open(names, epoch)).lease_ms
        lease = read_lease(store, names, epoch)
        self.seen(epoch, lease, asked_s=asked_s, owner_ms=self._owner_ms)

    def seen(self, epoch: int, lease: SeenLease | None, *, asked_s: float, owner_ms: int) -> None:
        """Record the newest epoch and its lease, requested at `asked_s` of the clock.

        `owner_ms` is the lease time from the open object.
        """
        self._owner_ms = owner_ms
        if self._last != (epoch, lease):
            # The change may have happened up to the answer, not only before the request.
            self._last, self._since_s = (epoch, lease), self._clock()
        else:
            counted_s = self._lease_ms / 1e3 / _RENEWALS
            self._since_s += max(0.0, asked_s - self._asked_s - counted_s)
        self._asked_s = max(asked_s, self._since_s)

    @property
    def epoch(self) -> int:
        """The newest epoch seen; 0 without epochs."""
        return self._last[0] if self._last else 0

    @property
    def lease(self) -> SeenLease | None:
        """The content of the newest epoch's lease."""
        return self._last[1] if self._last else None

    @property
    def remaining_ms(self) -> float:
        """The owner's remaining time after the last request; not above 0: expired.

        The owner's lease time counts if longer than the watcher's, up to an hour.
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
    """Return the timeout of a renewal: a second attempt must fit into the period."""
    return lease_ms / 1e3 / _RENEWALS / 2


def read_lease(store: ObjectStore, names: ShardNames, epoch: int) -> SeenLease | None:
    """Return the lease of an epoch; None for a missing or invalid object.

    The endpoint is unchecked text, for messages only. Raises store errors.
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
