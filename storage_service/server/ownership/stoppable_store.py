"""A store that answers nothing any more once the process is to stop.

What restores or follows a directory may take hours, and may be broken off between any two requests:
it is begun again, and gives the same.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from streamhouse.storage_service.journal.object_store import (
    LIST_COUNT_MAX,
    ObjectEntry,
    ObjectStore,
    StoreUnavailableError,
)
from streamhouse.storage_service.log.filesystem import Buffer

__all__ = ["StoppableStore"]


class StoppableStore:
    """`ObjectStore` that is another until `stop` is set, then raises `StoreUnavailableError`."""

    def __init__(self, inner: ObjectStore, stop: threading.Event) -> None:
        self._inner_store = inner
        self._stop = stop

    @property
    def _inner(self) -> ObjectStore:
        if self._stop.is_set():
            raise StoreUnavailableError(f"{self.url} is not asked any more: the process stops")
        return self._inner_store

    @property
    def url(self) -> str:
        """See `ObjectStore.url`."""
        return self._inner_store.url

    def create(self, key: str, buffers: Sequence[Buffer]) -> None:
        """See `ObjectStore.create`."""
        self._inner.create(key, buffers)

    def replace(self, key: str, data: Buffer) -> None:
        """See `ObjectStore.replace`."""
        self._inner.replace(key, data)

    def get(self, key: str, *, bytes_max: int) -> memoryview:
        """See `ObjectStore.get`."""
        return self._inner.get(key, bytes_max=bytes_max)

    def get_range(self, key: str, *, start: int, length: int) -> memoryview:
        """See `ObjectStore.get_range`."""
        return self._inner.get_range(key, start=start, length=length)

    def list_objects(
        self, folder: str, *, start_after: str = "", count_max: int = LIST_COUNT_MAX
    ) -> list[ObjectEntry]:
        """See `ObjectStore.list_objects`."""
        return self._inner.list_objects(folder, start_after=start_after, count_max=count_max)

    def delete(self, keys: Sequence[str]) -> None:
        """See `ObjectStore.delete`."""
        self._inner.delete(keys)

    def close(self) -> None:
        """See `ObjectStore.close`."""
        self._inner_store.close()
