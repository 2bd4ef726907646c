"""What is asked of a request that is answered, whichever protocol it came by."""

from __future__ import annotations

import asyncio
from typing import Protocol

from streamhouse.storage_service.server.caller import Caller
from streamhouse.storage_service.server.http.answer_memory import AnswerHold
from streamhouse.storage_service.server.http.http_exchange import Tenure

__all__ = ["Exchange"]


class Exchange(Protocol):
    """One request being answered. Event loop only."""

    caller: Caller
    """Who sent it."""
    share: str
    """Whose share of what is shared it uses; see `AccessControl`."""
    hold: AnswerHold | None
    """What its answer holds of the memory for answers."""
    tenure: Tenure | None
    """Asked before an answer leaves, and so after its data was read; not for what was stored."""
    request_id: str
    route: str
    """What metrics and log lines call it."""
    method: str
    path: str

    @property
    def client_address(self) -> str:
        """The address that it came from."""

    async def wait(self, waiter: asyncio.Future[None]) -> None:
        """Await `waiter`; raises `ClientGone` if the client goes away meanwhile."""

    def release(self) -> None:
        """Hold no memory for an answer any more."""
