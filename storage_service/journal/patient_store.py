"""An object store whose calls wait for it: each is repeated on its own until it is answered.

A start reads thousands of objects. If one answer in a hundred fails, who begins the whole of it
anew after a failure never comes to its end; who repeats the one call does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from streamhouse.storage_service.journal.object_store import (
    LIST_COUNT_MAX,
    ObjectEntry,
    ObjectStore,
    ObjectStoreError,
)
from streamhouse.storage_service.journal.steps import keep_trying
from streamhouse.storage_service.log.filesystem import Buffer

__all__ = ["PatientStore"]

_T = TypeVar("_T")


class PatientStore:
    """`ObjectStore` that repeats what fails while `store` is away or refuses.

    `pause` waits so many seconds and says whether to go on; if not, the last error is raised.
    `failed` is told each error. Both are called from the threads of those who ask.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        pause: Callable[[float], bool],
        failed: Callable[[ObjectStoreError], None],
    ) -> None:
        self._store = store
        self._pause = pause
        self._failed = failed

    @property
    def url(self) -> str:
        """See `ObjectStore.url`."""
        return self._store.url

    def create(self, key: str, buffers: Sequence[Buffer]) -> None:
        """See `ObjectStore.create`; what exists may be an attempt of ours, as there."""
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

    def close(self) -> None:
        """See `ObjectStore.close`."""
        self._store.close()

    def _ask(self, ask: Callable[[], _T]) -> _T:
        return keep_trying(ask, pause=self._pause, failed=self._failed)
