"""Object stores in memory: one that behaves, and one that does all that a store may do.

The second one keeps the single promise that is trusted: of all who create a key one succeeds, and
who reads it after that gets what the one wrote. Answers are lost, writes take effect late, a race
is answered as a conflict, lists show what was there some time ago.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

from streamhouse.storage_service.log.filesystem import Buffer
from streamhouse.storage_service.ownership.journal.store.object_store import (
    LIST_COUNT_MAX,
    ObjectEntry,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    StoreUnavailableError,
)

__all__ = ["FaultyMemoryStore", "MemoryStore"]


class MemoryStore:
    """`ObjectStore` of a dict."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.lock = threading.RLock()

    @property
    def url(self) -> str:
        return "memory://"

    def create(self, key: str, buffers: Sequence[Buffer]) -> None:
        with self.lock:
            if key in self.objects:
                raise ObjectExistsError(f"{key} exists")
            self.objects[key] = b"".join(buffers)

    def replace(self, key: str, data: Buffer) -> None:
        with self.lock:
            self.objects[key] = bytes(data)

    def get(self, key: str, *, bytes_max: int) -> memoryview:
        with self.lock:
            if key not in self.objects:
                raise ObjectNotFoundError(f"{key} is not there")
            if len(self.objects[key]) > bytes_max:
                raise ObjectTooLargeError(f"{key} has more than {bytes_max} bytes")
            return memoryview(self.objects[key])

    def get_range(self, key: str, *, start: int, length: int) -> memoryview:
        found = self.get(key, bytes_max=1 << 40)[start : start + length]
        if len(found) != length:
            raise ObjectNotFoundError(f"{key} has no bytes {start} to {start + length}")
        return found

    def list_objects(
        self, folder: str, *, start_after: str = "", count_max: int = LIST_COUNT_MAX
    ) -> list[ObjectEntry]:
        with self.lock:
            return _listed(self.objects, folder, start_after, count_max)

    def delete(self, keys: Sequence[str]) -> None:
        with self.lock:
            for key in keys:
                self.objects.pop(key, None)


def _listed(
    objects: dict[str, bytes], folder: str, start_after: str, count_max: int
) -> list[ObjectEntry]:
    keys = sorted(key for key in objects if key.startswith(folder) and key > start_after)
    return [ObjectEntry(key, len(objects[key])) for key in keys[:count_max]]


class FaultyMemoryStore(MemoryStore):
    """Does by chance, of a seed, what a store may do. `share` of the requests meet a fault."""

    def __init__(self, seed: int, *, share: float = 0.3) -> None:
        super().__init__()
        self._random = random.Random(f"memory store/{seed}")
        self._share = share
        self._late: list[Callable[[], None]] = []
        self._former: list[dict[str, bytes]] = [{}]
        self.is_away = False

    def create(self, key: str, buffers: Sequence[Buffer]) -> None:
        data = b"".join(buffers)
        with self.lock:
            fault = self._fault("lost", "late", "nothing", "conflict")
            if fault == "conflict":
                raise ObjectExistsError(f"{key}: a conflicting operation is in progress")
            if fault == "late":
                self._late.append(lambda: self.objects.setdefault(key, data) and None)
            if fault in ("late", "nothing"):
                raise StoreUnavailableError(f"{key}: no answer")
            super().create(key, [data])
            if fault == "lost":
                raise StoreUnavailableError(f"{key}: the answer was lost")

    def replace(self, key: str, data: Buffer) -> None:
        with self.lock:
            fault = self._fault("lost", "late", "nothing")
            if fault == "late":
                # The caller may use its buffer again after the answer.
                whole = bytes(data)
                self._late.append(lambda: self.objects.update({key: whole}))
            if fault in ("late", "nothing"):
                raise StoreUnavailableError(f"{key}: no answer")
            super().replace(key, data)
            if fault == "lost":
                raise StoreUnavailableError(f"{key}: the answer was lost")

    def get(self, key: str, *, bytes_max: int) -> memoryview:
        with self.lock:
            if self._fault("nothing"):
                raise StoreUnavailableError(f"{key}: no answer")
            return super().get(key, bytes_max=bytes_max)

    def list_objects(
        self, folder: str, *, start_after: str = "", count_max: int = LIST_COUNT_MAX
    ) -> list[ObjectEntry]:
        with self.lock:
            fault = self._fault("nothing", "stale")
            if fault == "nothing":
                raise StoreUnavailableError(f"{folder}: no answer")
            objects = self._random.choice(self._former) if fault else self.objects
            return _listed(objects, folder, start_after, count_max)

    def calm_down(self) -> None:
        """Meet no request with a fault any more; what is late happens now."""
        with self.lock:
            self._share = 0.0
            for late in self._late:
                late()
            self._late.clear()

    def _fault(self, *faults: str) -> str | None:
        if self.is_away:
            raise StoreUnavailableError("away")
        if self._random.random() < 0.1:
            self._former.append(dict(self.objects))
            del self._former[:-5]
        if self._late and self._random.random() < 0.2:
            self._late.pop(self._random.randrange(len(self._late)))()
        return self._random.choice(faults) if self._random.random() < self._share else None
