"""What the journal asks of an object store; `store_opening.py` opens one.

The one thing trusted is `create`: of all who create one key, one succeeds, and who reads the key
after that gets what the one wrote. `store_opening.probe` tries it before anything depends on it.
Lists may be stale; a write whose answer was lost may take effect at any later time.

All calls block, each for a bounded time, and are safe from any thread. Keys are relative to the
store's URL, of plain characters (`names.py`).
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
"""The most objects that one list answers, as of S3."""


class ObjectStoreError(Exception):
    """Root of what a store raises. The text names the store and the key, never a secret."""


class StoreUnavailableError(ObjectStoreError):
    """No answer, or one that says to try again: whether a write took effect is not known."""


class ObjectExistsError(ObjectStoreError):
    """The key is taken: by another, by a lost attempt of ours, or there was a race. Read it."""


class ObjectNotFoundError(ObjectStoreError):
    """There is no object of this key."""


class ObjectTooLargeError(ObjectStoreError):
    """The object has more bytes than the caller takes."""


class StoreRefusedError(ObjectStoreError):
    """The store does not let us: credentials, rights, a bucket that is not there."""


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """An object as a list shows it."""

    key: str
    size_bytes: int


class ObjectStore(Protocol):
    """Objects by key, all below one URL.

    Every call may raise `StoreUnavailableError` or `StoreRefusedError`.
    """

    @property
    def url(self) -> str:
        """Where it is, for messages; without secrets."""

    def create(self, key: str, buffers: Sequence[Buffer]) -> None:
        """Store an object of these bytes, joined, where there is none. Durable on return.

        Raises `ObjectExistsError`, also if it was an earlier attempt of the caller that succeeded.
        """

    def replace(self, key: str, data: Buffer) -> None:
        """Store the object, whatever was there. Durable on return."""

    def get(self, key: str, *, bytes_max: int) -> memoryview:
        """Return the object. Raises `ObjectNotFoundError`, `ObjectTooLargeError`."""

    def get_range(self, key: str, *, start: int, length: int) -> memoryview:
        """Return exactly these bytes. Raises `ObjectNotFoundError`, also if it has fewer."""

    def list_objects(
        self, folder: str, *, start_after: str = "", count_max: int = LIST_COUNT_MAX
    ) -> list[ObjectEntry]:
        """Return the first objects below `folder`, which ends with `/`, in order of their keys.

        Only keys greater than `start_after`. Fewer than `count_max` of them: there are no more.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Delete the objects, in any order; those that are not there count as deleted."""
