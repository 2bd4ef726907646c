"""Names with versions, over a store trusted for create-if-absent only; the newest counts.

Invariants:
- version n+1 is made by one writer after reading version n; no version is changed or deleted
- a version is read from the store once, because versions are immutable
- stale listings and lost answers never lead to a wrong version
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from streamhouse.core.backoff import Backoff
from streamhouse.core.errors import (
    CorruptDataError,
    StorageFailedError,
    StreamhouseError,
    UnavailableError,
    UnknownOutcomeError,
)
from streamhouse.storage_service.ownership.journal.names import DIRECTORY
from streamhouse.storage_service.ownership.journal.store.object_store import (
    LIST_COUNT_MAX,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectStore,
    ObjectStoreError,
    ObjectTooLargeError,
    StoreUnavailableError,
)
from streamhouse.storage_service.ownership.shards.entries import seal, unseal

__all__ = ["Chains", "DirectoryObjects", "Each", "Version", "version_key"]

_In = TypeVar("_In")
_Out = TypeVar("_Out")

_ATTEMPTS: Final = 6
_BACKOFF: Final = Backoff(first_s=0.05, most_s=1.0)
_DIGITS: Final = 8
_OBJECT_BYTES_MAX: Final = 64 << 10


class Each(Protocol):
    """Applies a function to values, as `map` does, or in parallel on threads."""

    def __call__(self, function: Callable[[_In], _Out], values: Iterable[_In], /) -> Iterable[_Out]:
        """Return the results of `function`, in order."""


class DirectoryObjects:
    """The shard directory's objects in the store of the journals, below `directory/`. Blocking.

    Each call raises a `StreamhouseError` if nothing happened or the outcome is unknown.
    """

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def create(self, key: str, data: bytes) -> bool:
        """Store an object unless the key exists; return whether the object was stored."""
        try:
            with _errors():
                self._objects.create(DIRECTORY + key, [data])
        except ObjectExistsError:
            return False
        return True

    def replace(self, key: str, data: bytes) -> None:
        """Store an object under a new or an existing key."""
        with _errors():
            self._objects.replace(DIRECTORY + key, data)

    def get(self, key: str) -> bytes | None:
        """Return an object, None if missing."""
        try:
            with _errors():
                return bytes(self._objects.get(DIRECTORY + key, bytes_max=_OBJECT_BYTES_MAX))
        except ObjectNotFoundError:
            return None

    def list(self, prefix: str) -> Iterable[str]:
        """Return the keys below `prefix`, ending with `/`; the newest keys may be missing."""
        folder, keys, last = DIRECTORY + prefix, [], ""
        while True:
            with _errors():
                page = self._objects.list_objects(folder, start_after=last)
            keys += [entry.key.removeprefix(DIRECTORY) for entry in page]
            if len(page) < LIST_COUNT_MAX:
                return keys
            last = page[-1].key


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Translate the store's errors to errors of the service for callers."""
    try:
        yield
    except (ObjectExistsError, ObjectNotFoundError):
        raise
    except StoreUnavailableError as error:
        raise UnavailableError(f"the directory of shards does not answer: {error}") from error
    except ObjectTooLargeError as error:
        raise CorruptDataError(
            f"the directory of shards has too large an object: {error}"
        ) from error
    except ObjectStoreError as error:
        raise StorageFailedError(f"the directory of shards cannot be used: {error}") from error


@dataclass(frozen=True, slots=True)
class Version:
    """A name's content at version `number`; a name without versions has number 0."""

    number: int
    content: Mapping[str, Any] | None


NO_VERSION: Final = Version(0, None)


class Chains:
    """All chains of one store. Thread-safe."""

    def __init__(
        self, store: DirectoryObjects, *, sleep: Callable[[float], object], each: Each = map
    ) -> None:
        self._store = store
        self._each = each
        self._sleep = sleep
        self._lock = threading.Lock()
        self._newest: dict[str, Version] = {}

    def head(self, name: str, *, at_least: int = 0) -> Version:
        """Return the newest visible version of a name; `at_least` is known to exist."""
        numbers = [_number(name, key) for key in self._store.list(f"{name}/")]
        return self._read(name, max(at_least, self._cached(name).number, *numbers, 0))

    def heads(
        self,
        prefix: str,
        *,
        is_wanted: Callable[[str], bool] = lambda _: True,
        passed_over: Callable[[CorruptDataError], object] | None = None,
    ) -> dict[str, Version]:
        """Return the newest version of every name beginning with `prefix`, by name.

        Unwanted names are listed and not read. A damaged version is an error, unless `passed_over`
        accepts the error.
        """
        numbers = self._numbers(prefix)

        def read(version: tuple[str, int]) -> Version | None:
            try:
                return self._read(*version)
            except CorruptDataError as error:
                if passed_over is None:
                    raise
                passed_over(error)
                return None

        wanted_names = [
            (name, number) for name, number in sorted(numbers.items()) if is_wanted(name)
        ]
        versions = zip(wanted_names, self._each(read, wanted_names), strict=True)
        return {name: version for (name, _), version in versions if version is not None}

    def names(self, prefix: str) -> list[str]:
        """Return every name beginning with `prefix`; no version is read."""
        return sorted(self._numbers(prefix))

    def _numbers(self, prefix: str) -> dict[str, int]:
        numbers: dict[str, int] = {}
        for key in self._store.list(prefix):
            name = key.rpartition("/")[0]
            numbers[name] = max(numbers.get(name, 0), _number(name, key))
        with self._lock:
            for name, version in self._newest.items():
                if name.startswith(prefix):
                    numbers[name] = max(numbers.get(name, 0), version.number)
        return numbers

    def advance(self, name: str, seen: Version, content: Mapping[str, Any]) -> Version | None:
        """Make the version after `seen`; None if another writer was faster.

        Raises a `StreamhouseError` if the store does not answer: the version may exist afterwards.
        """
        number = seen.number + 1
        if not self.create(version_key(name, number), content):
            # The other writer's version exists: the next `head` begins there.
            self._read(name, number)
            return None
        return self._remember(name, Version(number, content))

    def create(self, key: str, content: Mapping[str, Any]) -> bool:
        """Create one object; return whether the object is this call's."""
        data = seal(key, content, nonce=secrets.token_hex(8))
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                if self._store.create(key, data):
                    return True
            except StreamhouseError as error:
                is_passing = error.retriable or isinstance(error, UnknownOutcomeError)
                if not is_passing or attempt == _ATTEMPTS:
                    raise
                self._sleep(_BACKOFF.after(attempt))
                continue
            # The object may come from an earlier attempt (also the client's) with a lost answer.
            stored_data = self._store.get(key)
            if stored_data is not None:
                return stored_data == data
            # The store refused because of a race, but no object exists.
            self._sleep(_BACKOFF.after(attempt))
        raise UnavailableError(f"the store refuses to create {key}, which it does not have")

    def content(self, key: str) -> dict[str, Any] | None:
        """Return the content of one object, None if missing."""
        data = self._store.get(key)
        return None if data is None else unseal(key, data)

    def _read(self, name: str, number: int) -> Version:
        """Return an existing version, or a later cached version."""
        cached = self._cached(name)
        if number <= cached.number:
            return cached
        key = version_key(name, number)
        content = self.content(key)
        if content is None:
            raise CorruptDataError(f"{key} is missing in the store, although it was listed")
        return self._remember(name, Version(number, content))

    def _cached(self, name: str) -> Version:
        with self._lock:
            return self._newest.get(name, NO_VERSION)

    def _remember(self, name: str, version: Version) -> Version:
        with self._lock:
            newest = self._newest.get(name, NO_VERSION)
            if version.number > newest.number:
                self._newest[name] = newest = version
            return newest


def version_key(name: str, number: int) -> str:
    """Return the key of one version of a name."""
    return f"{name}/{number:0{_DIGITS}d}"


def _number(name: str, key: str) -> int:
    """Return the version in an object's key; 0 for a foreign key."""
    digits = key.removeprefix(f"{name}/")
    return int(digits) if len(digits) == _DIGITS and digits.isascii() and digits.isdecimal() else 0
