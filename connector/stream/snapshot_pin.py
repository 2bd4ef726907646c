"""Keeping the lake snapshot of a bootstrap from being expired while the stream runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from streamhouse.connector.stream.stream_position import Bootstrap
from streamhouse.storage_service.client import StorageClient
from streamhouse.storage_service.errors import StreamhouseError

__all__ = ["SnapshotPin"]

_log = logging.getLogger(__name__)

PIN_TTL_S: Final = 3_600.0
"""How long a stream may be stopped in the middle of a bootstrap and still find its snapshot."""

RENEWAL_S: Final = 300.0


class SnapshotPin:
    """At most one pin of one table, renewed in the background until it is released.

    Spark tells a source neither that a query ends nor how long a micro-batch takes: the process is
    just gone, and the pin with it after `PIN_TTL_S`. A service that cannot be reached for now is
    asked again; what matters is found out when the snapshot is read.
    """

    def __init__(self, client: Callable[[], StorageClient], table: str) -> None:
        self._client = client
        self._table = table
        self._held: Bootstrap | None = None
        self._released = threading.Event()

    def hold(self, bootstrap: Bootstrap) -> None:
        """Pin the bootstrap's snapshot, and go on doing so; repeated calls are free."""
        if self._held is not None and self._held.pin == bootstrap.pin:
            return
        self.release()
        self._pin(bootstrap)
        self._held = bootstrap
        self._released = threading.Event()
        # A daemon: the process may end at any time.
        threading.Thread(
            target=self._renew,
            args=(bootstrap, self._released),
            name="streamhouse-snapshot-pin",
            daemon=True,
        ).start()

    def release(self) -> None:
        """End the pin, if there is one."""
        if self._held is None:
            return
        self._released.set()
        pin, self._held = self._held.pin, None
        try:
            self._client().unpin_snapshot(self._table, holder=pin)
        except StreamhouseError as error:
            _log.warning("event=unpin_failed table=%s why=%r", self._table, error)

    def _renew(self, bootstrap: Bootstrap, released: threading.Event) -> None:
        while not released.wait(RENEWAL_S):
            try:
                self._pin(bootstrap)
            except StreamhouseError as error:
                _log.warning("event=pin_failed table=%s why=%r", self._table, error)

    def _pin(self, bootstrap: Bootstrap) -> None:
        self._client().pin_snapshot(
            self._table, bootstrap.snapshot_id, holder=bootstrap.pin, ttl_s=PIN_TTL_S
        )
