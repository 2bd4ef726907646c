"""Prepares the readers and writers of all messages, on a thread while the door is already open.

After a takeover clients wait, therefore the door opens at once. A message whose reader is not
prepared yet prepares the reader itself, on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Iterator

from streamhouse.core.threads import Pool
from streamhouse.storage_service.kafka.messages.prepared import prepare
from streamhouse.storage_service.kafka_door._api import Api

__all__ = ["Preparing"]

_logger = logging.getLogger(__name__)


class Preparing:
    """The preparation for one door. Event loop only, except for the thread."""

    def __init__(self, apis: Iterable[Api]) -> None:
        self._versions = list(_newest_first(apis))
        self._is_over = threading.Event()
        self._thread: Pool | None = None
        self._done: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """Begin; call once."""
        self._thread = Pool("kafka-messages", 1)
        self._done = asyncio.get_running_loop().run_in_executor(self._thread, self._prepare)

    async def wait_done(self) -> None:
        """Return when the preparation has ended."""
        if self._done is not None:
            await asyncio.shield(self._done)

    async def close(self) -> None:
        """Stop the preparation, and return when the thread has ended."""
        self._is_over.set()
        await self.wait_done()
        if self._thread is not None:
            self._thread.shutdown()

    def _prepare(self) -> None:
        begin_s = time.thread_time()
        try:
            for api_key, version in self._versions:
                if self._is_over.is_set():
                    return
                prepare(api_key, version)
        except Exception:  # the outermost of a thread: messages prepare themselves
            _logger.exception("event=kafka_messages_not_prepared")
        else:
            spent_s = time.thread_time() - begin_s
            _logger.info("event=kafka_messages_prepared processor_s=%.2f", spent_s)


def _newest_first(apis: Iterable[Api]) -> Iterator[tuple[int, int]]:
    """Yield the newest version of every API, the most used version, then the previous versions."""
    versions_left = {api.key: list(range(api.versions[0], api.versions[1] + 1)) for api in apis}
    while any(versions_left.values()):
        yield from (
            (api_key, versions.pop()) for api_key, versions in versions_left.items() if versions
        )
