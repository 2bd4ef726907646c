"""Answers of every process about itself, with or without an owned shard.

`/health` and `/ready` without a token are for load balancers and orchestrators: every caller gets
an answer, under any host name. `/health` also has the service id: a client checks the id of a new
address before sending a token to the address. `/ready` with a token, and `/metrics`, need a grant.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from streamhouse.storage_service.directory.runtime import RunBlocking
from streamhouse.storage_service.server.access.access import AccessControl
from streamhouse.storage_service.server.http.http_exchange import HttpExchange
from streamhouse.storage_service.server.routes import HEALTH_PATH, METRICS_PATH, READY_PATH
from streamhouse.storage_service.server.status.metrics import (
    METRICS_CONTENT_TYPE,
    ServiceMetrics,
)

__all__ = ["AboutProcess", "ProcessAnswer", "ProcessAnswers"]

_JSON = b"application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class AboutProcess:
    """The state of a process at a moment; `role` is None without a journal.

    `service_id` is None before the tables are open. `readiness` is for load balancers; callers with
    a token also get the fields of `known`.
    """

    readiness: tuple[int, str]
    role: str | None = None
    service_id: str | None = None
    known: dict[str, Any]

    def health(self) -> dict[str, str]:
        """Return the fields of `/health`."""
        fields = {"status": "alive", "role": self.role, "service_id": self.service_id}
        return {name: value for name, value in fields.items() if value is not None}


class ProcessAnswer(NamedTuple):
    """A whole answer."""

    status: int
    content_type: bytes
    body: bytes


class ProcessAnswers:
    """The answers of one process; `about` returns the present state."""

    def __init__(
        self,
        access: AccessControl,
        metrics: ServiceMetrics,
        run_blocking: RunBlocking,
        *,
        about: Callable[[], AboutProcess],
    ) -> None:
        self._access = access
        self._metrics = metrics
        self._run_blocking = run_blocking
        self._about = about

    def to_anybody(self, exchange: HttpExchange) -> ProcessAnswer | None:
        """Return the answer to a health check or probe without a token; None for other requests."""
        if exchange.path == HEALTH_PATH:
            # Alive in every role, stopping or full: an orchestrator must not kill it.
            exchange.route = "health"
            return _json(200, self._about().health())
        if exchange.path == READY_PATH and self._access.is_probe(exchange):
            exchange.route = "ready"
            status, word = self._about().readiness
            return _json(status, {"status": word})
        return None

    async def to_admitted(self, exchange: HttpExchange) -> ProcessAnswer | None:
        """Return the answer to an admitted request about the process; None for other requests."""
        if exchange.path == READY_PATH:
            about = self._about()
            status, word = about.readiness
            return _json(status, {"status": word, **about.known})
        if exchange.path == METRICS_PATH:
            text = await self._metrics.text(self._run_blocking)
            return ProcessAnswer(200, METRICS_CONTENT_TYPE.encode(), text)
        return None


def _json(status: int, value: dict[str, Any]) -> ProcessAnswer:
    return ProcessAnswer(status, _JSON, json.dumps(value).encode())
