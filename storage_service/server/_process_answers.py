"""What every process answers about itself, whether or not it owns its shard.

`/health` and `/ready` without a token are for who looks after processes: they are answered by
whatever name is asked for, to everybody. `/health` says of which service the process is, too: a
client that was told an address asks for it before it shows a token there. `/ready` with a token
and `/metrics` are answered to who may.
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
from streamhouse.storage_service.server.status._metrics import (
    METRICS_CONTENT_TYPE,
    ServiceMetrics,
)

__all__ = ["AboutProcess", "ProcessAnswer", "ProcessAnswers"]

_JSON = b"application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class AboutProcess:
    """A process at a moment. Without a journal it has no `role`.

    `service_id` is None until it is known. `readiness` is what a load balancer is told; `known` is
    for who has a token, besides.
    """

    readiness: tuple[int, str]
    role: str | None = None
    service_id: str | None = None
    known: dict[str, Any]

    def health(self) -> dict[str, str]:
        """Return what `/health` says."""
        found = {"status": "alive", "role": self.role, "service_id": self.service_id}
        return {name: value for name, value in found.items() if value is not None}


class ProcessAnswer(NamedTuple):
    """A whole answer."""

    status: int
    content_type: bytes
    body: bytes


class ProcessAnswers:
    """The answers of one process; `about` says what it is now."""

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
        """Return the answer to a request that shows no token, if it has one; it needs no more."""
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
        """Return the answer to a request that was admitted, if it is about the process."""
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
