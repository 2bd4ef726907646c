"""Where requests go: who serves a table, and where a call that failed is sent next.

A service is one process or several. What is known of them is learnt from their answers:

- `421 not_owner` names the owner, and says that nothing of the request was done
- a table's description names the process that serves it
- who does not answer serves nothing: its tables are asked for from the endpoints that were given

What is learnt may be wrong at any time, and is forgotten when an answer says so. Nothing here
sends or waits: `HttpTransport` does.
"""

from __future__ import annotations

import threading
from typing import Final, NamedTuple

from streamhouse.client.http._connection_pool import ReachingError
from streamhouse.client.http._http_connection import BrokenConnectionError
from streamhouse.client.http.endpoint import Endpoints
from streamhouse.core.backoff import Backoff
from streamhouse.core.errors import (
    NotOwnerError,
    StreamhouseError,
    UnavailableError,
    UnknownOutcomeError,
)

__all__ = ["BACKOFF", "Routes", "Search", "Step", "nothing_was_done", "table_of"]

BACKOFF: Final = Backoff(first_s=0.05, most_s=2.0)
"""The pauses of a call that finds nobody to answer it."""

_TABLES_KEPT_MAX: Final = 10_000
_OWNERS_FOLLOWED_MAX: Final = 8
"""One after the other without a pause: processes that name each other must not be a busy loop."""
_TABLE_ROUTES: Final = "/v1/tables/"


class Routes:
    """What one client knows of a service's processes. Thread-safe.

    `current` is asked for all that is no known table's: the endpoint that answered last, of those
    that were given or that were named as the owner of everything.
    """

    def __init__(self, endpoints: Endpoints, *, backoff: Backoff = BACKOFF) -> None:
        self.endpoints: Final = endpoints
        self.backoff = backoff
        """The pauses of a search; a test makes them short."""
        self.current = endpoints.listed[0].url
        self.is_reached = False
        """Whether a process of the service ever answered."""
        self.first_contact_s: float | None = None
        """How long nobody at all may answer before the endpoints are taken for wrong ones."""
        self._tables: dict[str, str] = {}
        self._lock = threading.Lock()

    def of(self, path: str, table: str = "") -> str:
        """Return the URL to send a request to, by its path or the table it is about."""
        # Most services are one process: then there is nothing to look up.
        if not self._tables:
            return self.current
        return self._tables.get(table or table_of(path), self.current)

    def learn(self, table: str, url: str) -> None:
        """Remember that `url` serves the table."""
        with self._lock:
            self._tables.pop(table, None)
            self._tables[table] = url
            while len(self._tables) > _TABLES_KEPT_MAX:
                del self._tables[next(iter(self._tables))]

    def forget(self, table: str) -> None:
        """Forget who serves the table."""
        with self._lock:
            self._tables.pop(table, None)

    def forget_process(self, url: str) -> None:
        """Forget that the process at `url`, which does not answer, serves any table."""
        with self._lock:
            for table in [table for table, known in self._tables.items() if known == url]:
                del self._tables[table]


class Step(NamedTuple):
    """Where a call goes next, and how long it waits before."""

    url: str
    wait_s: float


class Search:
    """The way of one call that failed. Made when it first fails: most calls never do.

    Args:
        routes: what the client knows; it learns here.
        table: the table that the call is about; empty if it is about none.
        deadline: until when it goes on if there is one process alone. Where there are several, it
            goes on for `failover_s` from its first failure.
        now: when it failed first, on the clock of `deadline`.
    """

    def __init__(self, routes: Routes, table: str, *, deadline: float, now: float) -> None:
        self._routes = routes
        self._table = table
        self._deadline = deadline
        self._started = now
        self._failover_until = now + routes.endpoints.failover_s
        self._asked: set[str] = set()
        """Since the last pause."""
        self._followed = 0
        self._rounds = 0
        self._spoke = ""
        """Who answered last, if only to say that it is not the owner."""
        self._is_failover = len(routes.endpoints.listed) > 1
        self.is_unknown = False
        """Whether an attempt may have been done."""

    def after(self, url: str, error: StreamhouseError, *, now: float) -> Step | None:
        """Return what follows an attempt at `url` that ended so, or None when it was the last.

        Only for errors that may pass. Whether the request may be sent twice is the caller's to
        know: `nothing_was_done`.
        """
        cause = error.__cause__
        if isinstance(cause, BrokenConnectionError) and cause.is_stale:
            # A kept connection was closed: that says nothing of the process.
            self.is_unknown = True
            return Step(url, 0.0)
        self._asked.add(url)
        owner = self._learn(url, error)
        if owner is not None and owner not in self._asked and self._followed < _OWNERS_FOLLOWED_MAX:
            self._followed += 1
            return Step(owner, 0.0)
        if _is_elsewhere(error):
            for listed in self._routes.endpoints.urls:
                if listed not in self._asked:
                    return Step(listed, 0.0)
            url = self._spoke or self._routes.endpoints.urls[0]
        return self._after_pause(url, now=now)

    def found(self, url: str) -> None:
        """Learn that the search ended at `url`."""
        routes = self._routes
        is_listed = url in routes.endpoints.urls
        if self._table and not (is_listed and len(routes.endpoints.urls) == 1):
            routes.learn(self._table, url)
        if is_listed or not self._table:
            routes.current = url

    def _learn(self, url: str, error: StreamhouseError) -> str | None:
        """Take in what an error says of the processes; return the owner that it names."""
        if isinstance(error, NotOwnerError):
            self._is_failover = True
            self._spoke = url
            self._routes.forget(self._table)
            return self._routes.endpoints.told(error.owner)
        if isinstance(error, UnknownOutcomeError) or _is_unreachable(error):
            self.is_unknown |= isinstance(error, UnknownOutcomeError)
            self._routes.forget_process(url)
            if self._spoke == url:
                self._spoke = ""
        else:
            self._spoke = url
        return None

    def _after_pause(self, url: str, *, now: float) -> Step | None:
        self._rounds += 1
        self._asked.clear()
        self._followed = 0
        until = self._failover_until if self._is_failover else self._deadline
        backoff, patience_s = self._routes.backoff, self._routes.first_contact_s
        if patience_s is not None and not self._routes.is_reached:
            until = min(until, self._started + patience_s)
        if now + backoff.after(self._rounds) > until:
            return None
        return Step(url, backoff.jittered_after(self._rounds))


def table_of(path: str) -> str:
    """Return the table that a request with this path is about; empty if it is about none."""
    if not path.startswith(_TABLE_ROUTES):
        return ""
    return path[len(_TABLE_ROUTES) :].partition("/")[0]


def nothing_was_done(error: StreamhouseError) -> bool:
    """Whether a request that ended so had no effect: then it may be sent again, whatever it is."""
    return isinstance(error, NotOwnerError) or _is_unreachable(error)


def _is_unreachable(error: StreamhouseError) -> bool:
    return isinstance(error.__cause__, ReachingError)


def _is_elsewhere(error: StreamhouseError) -> bool:
    """Whether another process may serve what this one did not; a busy owner is still the owner."""
    return isinstance(error, NotOwnerError | UnknownOutcomeError | UnavailableError)
