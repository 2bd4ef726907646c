"""The targets of requests: which process serves a table, and where a failed call goes next.

A service is one process or several. The client learns about them from their answers:

- `421 not_owner` names the owner, and means that the request had no effect
- a table's description names the process that serves the table
- a process that does not answer serves nothing: the configured endpoints are asked for its tables

A learnt route may be wrong at any time, and is forgotten when an answer says so. This module
neither sends nor waits: `HttpTransport` does.
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

__all__ = ["BACKOFF", "RouteSearch", "Routes", "Step", "nothing_was_done", "table_of"]

BACKOFF: Final = Backoff(first_s=0.05, most_s=2.0)
"""The pauses of a call while no process answers it."""

_TABLES_KEPT_MAX: Final = 10_000
_OWNERS_FOLLOWED_MAX: Final = 8
"""Followed one after the other without a pause: processes naming each other must not cause a busy
loop.
"""
_TABLE_ROUTES: Final = "/v1/tables/"


class Routes:
    """One client's knowledge of a service's processes. Thread-safe.

    `current` gets every request without a learnt route: the endpoint of the last answer, among the
    configured endpoints and the endpoints named as owner of everything.
    """

    def __init__(self, endpoints: Endpoints, *, backoff: Backoff = BACKOFF) -> None:
        self.endpoints: Final = endpoints
        self.backoff = backoff
        """The pauses of a search; a test makes them short."""
        self.current = endpoints.listed[0].url
        self.is_reached = False
        """Whether a process of the service has ever answered."""
        self.first_contact_s: float | None = None
        """The time without any first answer after which the endpoints count as wrong."""
        self._tables: dict[str, str] = {}
        self._lock = threading.Lock()

    def of(self, path: str, table: str = "") -> str:
        """Return the URL for a request, by its path or by the request's table."""
        # Most services are one process: no table has a route of its own then.
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
        """Forget which process serves the table."""
        with self._lock:
            self._tables.pop(table, None)

    def forget_process(self, url: str) -> None:
        """Forget all routes to the process at `url`, which does not answer."""
        with self._lock:
            for table in [
                table for table, serving_url in self._tables.items() if serving_url == url
            ]:
                del self._tables[table]


class Step(NamedTuple):
    """The next target of a call, and the wait before the attempt."""

    url: str
    wait_s: float


class RouteSearch:
    """The path of one failed call. Made at the first failure: most calls never fail.

    Args:
        routes: the client's routes; the search adds to them.
        table: the table of the call; empty for a call without a table.
        deadline: the end of the search in a service of a single process. With several processes the
            search goes on for `failover_s` from the first failure.
        now: the time of the first failure, on the clock of `deadline`.
    """

    def __init__(self, routes: Routes, table: str, *, deadline: float, now: float) -> None:
        self._routes = routes
        self._table = table
        self._deadline = deadline
        self._started = now
        self._failover_until = now + routes.endpoints.failover_s
        self._tried: set[str] = set()
        """The URLs tried since the last pause."""
        self._followed = 0
        self._rounds = 0
        self._last_speaker = ""
        """The URL of the last answer, even one that only denies being the owner."""
        self._is_failover = len(routes.endpoints.listed) > 1
        self.is_unknown = False
        """Whether an attempt may have had an effect."""

    def after(self, url: str, error: StreamhouseError, *, now: float) -> Step | None:
        """Return the step after a failed attempt at `url`, or None after the last attempt.

        Only for errors that may pass. The caller decides whether the request may be sent twice:
        `nothing_was_done`.
        """
        cause = error.__cause__
        if isinstance(cause, BrokenConnectionError) and cause.is_stale:
            # A kept connection was closed: this means nothing for the process.
            self.is_unknown = True
            return Step(url, 0.0)
        self._tried.add(url)
        owner = self._learn(url, error)
        if owner is not None and owner not in self._tried and self._followed < _OWNERS_FOLLOWED_MAX:
            self._followed += 1
            return Step(owner, 0.0)
        if _is_elsewhere(error):
            for listed in self._routes.endpoints.urls:
                if listed not in self._tried:
                    return Step(listed, 0.0)
            url = self._last_speaker or self._routes.endpoints.urls[0]
        return self._after_pause(url, now=now)

    def succeed(self, url: str) -> None:
        """Learn that the call succeeded at `url`."""
        routes = self._routes
        is_listed = url in routes.endpoints.urls
        if self._table and not (is_listed and len(routes.endpoints.urls) == 1):
            routes.learn(self._table, url)
        if is_listed or not self._table:
            routes.current = url

    def _learn(self, url: str, error: StreamhouseError) -> str | None:
        """Learn from an error about the processes; return the owner that it names."""
        if isinstance(error, NotOwnerError):
            self._is_failover = True
            self._last_speaker = url
            self._routes.forget(self._table)
            return self._routes.endpoints.resolve(error.owner)
        if isinstance(error, UnknownOutcomeError) or _is_unreachable(error):
            self.is_unknown |= isinstance(error, UnknownOutcomeError)
            self._routes.forget_process(url)
            if self._last_speaker == url:
                self._last_speaker = ""
        else:
            self._last_speaker = url
        return None

    def _after_pause(self, url: str, *, now: float) -> Step | None:
        self._rounds += 1
        self._tried.clear()
        self._followed = 0
        until = self._failover_until if self._is_failover else self._deadline
        backoff, patience_s = self._routes.backoff, self._routes.first_contact_s
        if patience_s is not None and not self._routes.is_reached:
            until = min(until, self._started + patience_s)
        if now + backoff.after(self._rounds) > until:
            return None
        return Step(url, backoff.jittered_after(self._rounds))


def table_of(path: str) -> str:
    """Return the table of a request's path; empty for a path without a table."""
    if not path.startswith(_TABLE_ROUTES):
        return ""
    return path[len(_TABLE_ROUTES) :].partition("/")[0]


def nothing_was_done(error: StreamhouseError) -> bool:
    """Return whether a failed request had no effect; then any request may be sent again."""
    return isinstance(error, NotOwnerError) or _is_unreachable(error)


def _is_unreachable(error: StreamhouseError) -> bool:
    # `raise ... from None` keeps the context.
    return isinstance(error.__cause__ or error.__context__, ReachingError)


def _is_elsewhere(error: StreamhouseError) -> bool:
    """Return whether another process may serve the request; a busy owner is still the owner."""
    return isinstance(error, NotOwnerError | UnknownOutcomeError | UnavailableError)
