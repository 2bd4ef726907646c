"""A tiering worker as a thread of another process: `serve --tiering embedded`."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
from typing import Final

from streamhouse.client import StorageClient
from streamhouse.core.errors import StreamhouseError
from streamhouse.core.threads import NamedThread
from streamhouse.core.traces.exporter_settings import opened_spans

__all__ = ["EmbeddedTieringWorker"]

_logger = logging.getLogger(__name__)

_STOP_WAIT_S_MAX: Final = 30.0


class EmbeddedTieringWorker:
    """Tiers the tables of the service at `endpoint` in threads of this process.

    `start` returns at once. `stop` ends the running round early, hands its claim back, and returns
    when the thread has ended, after 30 seconds at most. Both may be called once. The service names
    its own worker with `worker_id`.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        token: str | None = None,
        parallelism: int | None = None,
        worker_id: str | None = None,
    ) -> None:
        self._worker_id = worker_id
        self._endpoint = endpoint
        self._token = token
        # The process that embeds the worker keeps half of the cores.
        self._parallelism = parallelism or max(1, (os.cpu_count() or 2) // 2)
        self._stopping = threading.Event()
        self._thread = NamedThread("tiering", self._run)

    def start(self) -> None:
        """Begin to tier."""
        self._thread.start()

    def stop(self) -> None:
        """Stop tiering."""
        self._stopping.set()
        self._thread.join(_STOP_WAIT_S_MAX)
        if self._thread.is_alive():
            _logger.warning("event=worker_not_stopped waited_s=%d", _STOP_WAIT_S_MAX)

    def _run(self) -> None:
        self._say_starting()
        from streamhouse.lake.lake_tables import IcebergLake  # noqa: PLC0415 - pyiceberg does not delay serving
        from streamhouse.tiering.worker._service import TieringService, new_worker_id  # noqa: PLC0415 - pyiceberg does not delay serving
        from streamhouse.tiering.worker.thread_runner import ThreadRunner  # noqa: PLC0415 - pyiceberg does not delay serving

        # Imported objects stay for ever: garbage collections that walk these objects would stop
        # every thread of the process for 40 to 50 ms each time.
        gc.collect()
        gc.freeze()
        try:
            with (
                StorageClient(self._endpoint, token=self._token) as client,
                opened_spans("streamhouse-tiering") as spans,
            ):
                lake = IcebergLake(client.lake_catalog())
                try:
                    TieringService(
                        client=client,
                        lake=lake,
                        runner=ThreadRunner(self._parallelism),
                        token=self._token,
                        worker_id=self._worker_id or new_worker_id(),
                        tables_in_flight=max(2, self._parallelism),
                        stopping=self._stopping,
                        spans=spans,
                        shares_log=True,
                    ).run_forever()
                finally:
                    lake.close()
        except StreamhouseError:
            _logger.exception("event=worker_ended")

    def _say_starting(self) -> None:
        """Show the worker in the service's status while the lake's library loads."""
        with (
            contextlib.suppress(StreamhouseError),
            StorageClient(self._endpoint, token=self._token) as client,
        ):
            client.claim_tiering(self._worker_id or "embedded", tables=[])
