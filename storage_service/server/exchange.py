"""The common interface of a request and its answer, for all protocols."""

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
    """The sender."""
    share: str
    """The caller's key in `FairShares`; see `AccessControl`."""
    hold: AnswerHold | None
    """The memory of the answer."""
    tenure: Tenure | None
    """Checked after the read of the data and before the answer; None for answers of stored data."""
    request_id: str
    route: str
    """The name for metrics and log lines."""
    method: str
    path: str

    @property
    def client_address(self) -> str:
        """The client's address."""

    async def wait(self, waiter: asyncio.Future[None]) -> None:
        """Await `waiter`; raises `ClientGone` if the client disconnects meanwhile."""

    def release(self) -> None:
        """Release the memory of the answer."""
