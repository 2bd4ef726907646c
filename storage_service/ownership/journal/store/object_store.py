"""The journal's interface to an object store; `store_opening.py` opens a store.

Only `create` is trusted: of all creators of one key exactly one succeeds, and later readers get
this creator's bytes. `store_opening.probe` tests `create` before first use. Lists may be stale; a
write with a lost answer may take effect at any later time.

All calls block, each for a bounded time, and are safe from any thread. Keys are relative to the
store's URL, with plain characters (`names.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from streamhouse.storage_service.log.filesystem import Buffer

__all__ = [
    "LIST_COUNT_MAX",
    "ObjectEntry",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "ObjectStore",
    "ObjectStoreError",
    "ObjectTooLargeError",
    "StoreRefusedError",
    "StoreUnavailableError",
]

LIST_COUNT_MAX: Final = 1_000
"""The most objects in one list, as in S3."""


class ObjectStoreError(Exception):
    """Root of a store's errors. The text names the store and the key, never a secret."""


class StoreUnavailableError(ObjectStoreError):
    """No answer, or a temporary refusal: the effect of a write is unknown."""


class ObjectExistsError(ObjectStoreError):
    """The key exists: a foreign object, a lost attempt of this process, or a race.

    Read the object to find out.
    """


class ObjectNotFoundError(ObjectStoreError):
    """No object has this key."""


class ObjectTooLargeError(ObjectStoreError):
    """The object has more bytes than allowed by the caller."""


class StoreRefusedError(ObjectStoreError):
    """The store refuses: credentials, rights, a missing bucket."""


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """An object in a list."""

    key: str
    size_bytes: int


class ObjectStore(Protocol):
    """Objects by key, all below one URL.

    Every call may raise `StoreUnavailableError` or `StoreRefusedError`.
    """

    @property
    def url(self) -> str:
        """The store's URL for messages; without secrets."""

    def create(self, key: str, buffers: Sequence[Buffer]) -> None:
        """Store an object of these bytes, joined, under a new key. Durable on return.

        Raises `ObjectExistsError`, also after a successful earlier attempt of the caller.
        """

    def replace(self, key: str, data: Buffer) -> None:
        """Store the object under a new or an existing key. Durable on return.

        The caller may use the memory of `data` again then, also after an error.
        """

    def get(self, key: str, *, bytes_max: int) -> memoryview:
        """Return the object. Raises `ObjectNotFoundError`, `ObjectTooLargeError`."""

    def get_range(self, key: str, *, start: int, length: int) -> memoryview:
        """Return exactly these bytes. Raises `ObjectNotFoundError`, also for a shorter object."""

    def list_objects(
        self, folder: str, *, start_after: str = "", count_max: int = LIST_COUNT_MAX
    ) -> list[ObjectEntry]:
        """Return the first objects below `folder`, ending with `/`, in order of their keys.

        Only keys greater than `start_after`. Fewer than `count_max` objects mean the end.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Delete the objects, in any order; missing objects count as deleted."""
