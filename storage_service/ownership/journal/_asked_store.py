"""Object stores around another store: one retries each call, one can be stopped.

A start reads thousands of objects. With one failure in a hundred requests, restarting everything
after a failure would never end; retrying the failed call does (`PatientStore`). A start may also
take hours, and can be stopped between any two requests (`StoppableStore`): a restart gives the same
result.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from streamhouse.storage_service.log.filesystem import Buffer
from streamhouse.storage_service.ownership.journal.steps import keep_trying
from streamhouse.storage_service.ownership.journal.store.object_store import (
    LIST_COUNT_MAX,
    ObjectEntry,
    ObjectStore,
    ObjectStoreError,
    StoreUnavailableError,
)

__all__ = ["PatientStore", "StoppableStore"]

_T = TypeVar("_T")


class _AskedStore(ABC):
    """`ObjectStore` around another store; `_ask` makes each call."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @abstractmethod
    def _ask(self, ask: Callable[[], _T]) -> _T:
        """Make a call and return its answer."""

    @property
    def url(self) -> str:
        """See `ObjectStore.url`."""
        return self._store.url

    def create(self, key: str, buffers: Sequence[Buffer]) -> None:
        """See `ObjectStore.create`."""
        self._ask(lambda: self._store.create(key, buffers))

    def replace(self, key: str, data: Buffer) -> None:
        """See `ObjectStore.replace`."""
        self._ask(lambda: self._store.replace(key, data))

    def get(self, key: str, *, bytes_max: int) -> memoryview:
        """See `ObjectStore.get`."""
        return self._ask(lambda: self._store.get(key, bytes_max=bytes_max))

    def get_range(self, key: str, *, start: int, length: int) -> memoryview:
        """See `ObjectStore.get_range`."""
        return self._ask(lambda: self._store.get_range(key, start=start, length=length))

    def list_objects(
        self, folder: str, *, start_after: str = "", count_max: int = LIST_COUNT_MAX
    ) -> list[ObjectEntry]:
        """See `ObjectStore.list_objects`."""
        return self._ask(
            lambda: self._store.list_objects(folder, start_after=start_after, count_max=count_max)
        )

    def delete(self, keys: Sequence[str]) -> None:
        """See `ObjectStore.delete`."""
        self._ask(lambda: self._store.delete(keys))


class PatientStore(_AskedStore):
    """Retries failed calls while `store` is unavailable or refuses.

    `pause` waits the seconds and returns whether to go on; if not, the last error is raised.
    `failed` gets each error. Both run on the callers' threads.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        pause: Callable[[float], bool],
        failed: Callable[[ObjectStoreError], None],
    ) -> None:
        super().__init__(store)
        self._pause = pause
        self._failed = failed

    def _ask(self, ask: Callable[[], _T]) -> _T:
        return keep_trying(ask, pause=self._pause, failed=self._failed)


class StoppableStore(_AskedStore):
    """Answers until `stop` is set, then raises `StoreUnavailableError`."""

    def __init__(self, store: ObjectStore, stop: threading.Event) -> None:
        super().__init__(store)
        self._stop = stop

    def _ask(self, ask: Callable[[], _T]) -> _T:
        if self._stop.is_set():
            raise StoreUnavailableError(f"{self.url} is not asked any more: the process stops")
        return ask()
