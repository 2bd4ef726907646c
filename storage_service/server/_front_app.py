"""The ASGI application of a process with a journal, which answers from the start in every role.

While the process does not own its shard, health and readiness report the role, and metrics report
the journal. All other requests with a valid token get `not_owner`; only health and the bare
readiness need no token. Once the process owns the shard, the service's application answers.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Coroutine
from typing import Any

from streamhouse.core.errors import InternalError, StreamhouseError
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.runtime import RunBlocking
from streamhouse.storage_service.ownership.roles.role import Standing
from streamhouse.storage_service.server._process_answers import (
    AboutProcess,
    ProcessAnswers,
)
from streamhouse.storage_service.server.access.access import AccessControl, ForeignRequests
from streamhouse.storage_service.server.doors import Doors
from streamhouse.storage_service.server.http._own_task import own_task
from streamhouse.storage_service.server.http.http_exchange import (
    App,
    ClientGone,
    HttpExchange,
    Receive,
    Scope,
    Send,
)
from streamhouse.storage_service.server.status.metrics import ServiceMetrics

__all__ = ["FrontApp"]

_logger = logging.getLogger(__name__)


class FrontApp:
    """See the module. Event loop only."""

    def __init__(
        self,
        config: ServiceConfig,
        *,
        standing: Standing,
        metrics: ServiceMetrics,
        run_blocking: RunBlocking,
        doors: Doors,
    ) -> None:
        self._doors = doors
        self._config = config
        self._standing = standing
        self._metrics = metrics
        self._access = AccessControl(config)
        self._foreign_requests = ForeignRequests(config)
        self._of_process = ProcessAnswers(self._access, metrics, run_blocking, about=self._about)
        self._service_app: App | None = None

    def hand_over(self, app: App) -> None:
        """Let `app` answer from now on: this process owns the shard."""
        self._service_app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Answer one request; the service's application is called without a further await."""
        return (self._service_app or self._answer_request)(scope, receive, send)

    async def _answer_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(
            scope,
            receive,
            send,
            request_id=secrets.token_hex(6),
            config=self._config,
        )
        try:
            await self._answer(exchange)
        except ClientGone:
            pass
        except StreamhouseError as error:
            self._metrics.errors.labels(error.code).inc()
            await self._doors.answer_error(exchange, error)
        except Exception:  # the outermost loop of a request: a bug is answered, not dropped
            _logger.exception("event=bug request_id=%s path=%s", exchange.request_id, exchange.path)
            await exchange.answer_error(InternalError("the service met a bug; its log has it"))
        finally:
            await exchange.end()

    async def _answer(self, exchange: HttpExchange) -> None:
        answer = self._of_process.to_anybody(exchange)
        if answer is None:
            self._foreign_requests.check(exchange.method, exchange.scope["headers"])
            self._doors.find(exchange)
            self._access.admit(exchange)
            await own_task()
            answer = await self._of_process.to_admitted(exchange)
        if answer is None:
            raise self._standing.not_owner()
        await exchange.answer(answer.status, answer.content_type, [answer.body])

    def _about(self) -> AboutProcess:
        standing = self._standing
        return AboutProcess(
            # Not 200: a load balancer should send requests only to the owner.
            readiness=(503, standing.role),
            role=standing.role,
            service_id=standing.service_id,
            known={"owner": standing.owner},
        )
