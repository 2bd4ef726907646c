"""Readers and writers of all messages, made on a thread while the door is open already.

A door that opens after a takeover has clients that wait, so it does not wait for them itself: a
message that comes before its own are made has them made at once, on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from streamhouse.storage_service.kafka.messages.prepared import prepare
from streamhouse.storage_service.kafka_door._api import Api

__all__ = ["Preparing"]

_logger = logging.getLogger(__name__)


class Preparing:
    """The work of one door. Event loop only, but for its thread."""

    def __init__(self, apis: Iterable[Api]) -> None:
        self._versions = list(_newest_first(apis))
        self._is_over = threading.Event()
        self._thread: ThreadPoolExecutor | None = None
        self._done: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """Begin; once."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kafka-messages")
        self._done = asyncio.get_running_loop().run_in_executor(self._thread, self._prepare)

    async def wait_done(self) -> None:
        """Return when all are made that are to be."""
        if self._done is not None:
            await asyncio.shield(self._done)

    async def close(self) -> None:
        """Make no more; returns when the thread is at its end."""
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
        except Exception:  # the outermost of a thread: what needs them makes them
            _logger.exception("event=kafka_messages_not_prepared")
        else:
            spent_s = time.thread_time() - begin_s
            _logger.info("event=kafka_messages_prepared processor_s=%.2f", spent_s)


def _newest_first(apis: Iterable[Api]) -> Iterator[tuple[int, int]]:
    """Yield the newest version of every API, which most clients speak, then the one before it."""
    left = {api.key: list(range(api.versions[0], api.versions[1] + 1)) for api in apis}
    while any(left.values()):
        yield from ((api_key, versions.pop()) for api_key, versions in left.items() if versions)
