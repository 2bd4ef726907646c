"""Handing applied changes to RocksDB, in large runs, behind those who write them.

The changes are durable in the log and found in memory meanwhile, so that nothing depends on when it
happens; only so much may wait. One thread changes it; any may ask for the rows under a prefix.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from streamhouse.storage_service.errors import (
    CorruptDataError,
    OverloadedError,
    StorageFailedError,
)
from streamhouse.storage_service.kv.cache.write_backlog import Piece, WriteBacklog
from streamhouse.storage_service.kv.kv_options import KvOptions
from streamhouse.storage_service.kv.rocksdb_store import RocksdbStore

__all__ = ["WriteBehind"]

_logger = logging.getLogger(__name__)

# How long a read waits for a run to be handed over before it disturbs it.
_HANDOVER_WAIT_S: Final = 1.0
# How long to leave RocksDB alone that is behind with compacting.
_RETRY_S: Final = 0.05
# Below this a run is so small that RocksDB would cost more than it frees.
_RUN_BYTES_MIN: Final = 256 << 10
# Changes that wait lie in memory beside the rows they made.
_SHARE_OF_MEMORY: Final = 4


class WriteBehind:
    """What one store does not have yet."""

    def __init__(
        self,
        store: RocksdbStore,
        options: KvOptions,
        *,
        where: str,
        on_handed_over: Callable[[], None],
    ) -> None:
        self._store: Final = store
        self._options: Final = options
        self._where: Final = where
        self._on_handed_over: Final = on_handed_over
        self._backlog: Final = WriteBacklog()
        self._retry_rows = 0
        self._memory_allowed = options.backlog_bytes * _SHARE_OF_MEMORY
        self._not_handing_over: Final = threading.Event()
        self._not_handing_over.set()

    @property
    def memory_bytes(self) -> int:
        """The bytes of the changes that wait."""
        return self._backlog.memory_bytes

    def limit_memory(self, allowed_bytes: int) -> None:
        """Let the bucket have this much memory in all: of less, less may wait."""
        self._memory_allowed = allowed_bytes

    def wait(self) -> None:
        """Return when nothing is being handed over, or after a while: before reading the store."""
        self._not_handing_over.wait(_HANDOVER_WAIT_S)

    def changes_under(self, prefix: bytes) -> dict[bytes, bytes | None]:
        """Return the latest value of each key that starts with `prefix`; None was deleted.

        What is handed over meanwhile is then seen here and in the store, not in neither.
        """
        newer = self._backlog.changes_under(prefix)
        self.wait()
        return newer

    def add(self, piece: Piece) -> None:
        """Append changes."""
        self._backlog.add(piece)

    def hand_over_if_due(self) -> None:
        """Hand over when enough waits, if that is possible now."""
        if not self._is_due() or self._backlog.rows < self._retry_rows:
            return
        try:
            self.hand_over()
        except (CorruptDataError, OverloadedError, StorageFailedError) as error:
            waiting = self._backlog.rows
            # A run that was refused is not tried again for every row that comes after it.
            self._retry_rows = waiting + self._options.backlog_rows // 2
            _logger.warning(
                "event=rocksdb_behind bucket=%r rows=%d why=%r", self._where, waiting, error.message
            )

    def check(self) -> None:
        """Raise OverloadedError while so much waits that nothing more is planned."""
        if self._is_too_much():
            self.hand_over()

    def wait_for_room(self) -> None:
        """Return when no more waits than may: for rows that nobody waits to see accepted."""
        while self._is_too_much():
            try:
                self.hand_over()
            except OverloadedError:
                time.sleep(_RETRY_S)

    def hand_over(self) -> None:
        """Give RocksDB everything that waits, as one run. What it refuses goes on waiting."""
        if not self._backlog:
            return
        self._not_handing_over.clear()
        try:
            run = self._backlog.as_run()
            self._store.write(run.keys, run.values, marker=run.marker)
            self._store.seal()
        finally:
            self._not_handing_over.set()
        self._backlog.clear()
        self._on_handed_over()
        self._retry_rows = 0

    def _is_due(self) -> bool:
        share = max(self._memory_allowed // _SHARE_OF_MEMORY, _RUN_BYTES_MIN)
        return (
            self._backlog.rows >= self._options.backlog_rows
            or self._backlog.memory_bytes >= min(self._options.backlog_bytes, share)
        )

    def _is_too_much(self) -> bool:
        return (
            self._backlog.rows >= 4 * self._options.backlog_rows
            or self._backlog.memory_bytes >= 4 * self._options.backlog_bytes
        )
