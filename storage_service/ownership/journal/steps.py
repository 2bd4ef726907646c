"""A protocol as steps: a generator yields requests to the store and receives the answers.

So the same protocol runs over a real store (`run`) and, in tests, in every order of the steps of
several owners. Errors of a step are raised at its `yield`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from streamhouse.core.backoff import Backoff
from streamhouse.storage_service.log.filesystem import Buffer
from streamhouse.storage_service.ownership.journal.object_format import OBJECT_BYTES_MAX
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectStore,
    ObjectStoreError,
    StoreRefusedError,
    StoreUnavailableError,
)

__all__ = [
    "Create",
    "Get",
    "List",
    "Step",
    "Steps",
    "do",
    "get_or_none",
    "keep_trying",
    "run",
    "run_on",
    "stored",
]

_BACKOFF: Final = Backoff(first_s=0.05, most_s=2.0)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Create:
    """`ObjectStore.create`: None when it is stored."""

    key: str
    buffers: Sequence[Buffer]


@dataclass(frozen=True, slots=True)
class Get:
    """`ObjectStore.get`: the object."""

    key: str


@dataclass(frozen=True, slots=True)
class List:
    """`ObjectStore.list_objects`: the entries."""

    folder: str
    start_after: str
    count_max: int


Step: TypeAlias = Create | Get | List
Steps: TypeAlias = Generator[Step, Any, _T]


def do(store: ObjectStore, step: Step) -> Any:
    """Take one step. Raises store errors."""
    match step:
        case Create(key, buffers):
            store.create(key, buffers)
            return None
        case Get(key):
            return store.get(key, bytes_max=OBJECT_BYTES_MAX)
        case List(folder, start_after, count_max):
            return store.list_objects(folder, start_after=start_after, count_max=count_max)


def keep_trying(
    ask: Callable[[], _T],
    *,
    pause: Callable[[float], bool],
    failed: Callable[[ObjectStoreError], None],
) -> _T:
    """Repeat a request while the store is unavailable or refuses; return the answer.

    `pause` waits the seconds and returns whether to go on; if not, the last error is raised.
    """
    failures = 0
    while True:
        try:
            return ask()
        except (StoreUnavailableError, StoreRefusedError) as error:
            failures += 1
            failed(error)
            if not pause(_BACKOFF.jittered_after(failures)):
                raise


def run(steps: Steps[_T], take: Callable[[Step], Any]) -> _T:
    """Take all steps, each by `take`, and return the generator's result."""
    try:
        step = next(steps)
        while True:
            try:
                answer = take(step)
            except ObjectStoreError as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        result: _T = stop.value
        return result


def run_on(store: ObjectStore, steps: Steps[_T]) -> _T:
    """Take all steps on a store, each once, and return the generator's result."""
    return run(steps, functools.partial(do, store))


def stored(step: Create, is_ours: Callable[[memoryview], bool]) -> Steps[memoryview | None]:
    """Create an object; return None once stored as this process's, else the foreign object.

    An existing object may come from an earlier attempt with a lost answer. An unreadable object
    means a race, and the attempt is repeated.
    """
    while True:
        try:
            yield step
        except ObjectExistsError:
            stored_object = yield from get_or_none(step.key)
            if stored_object is None:
                continue
            return None if is_ours(stored_object) else stored_object
        return None


def get_or_none(key: str) -> Steps[memoryview | None]:
    """Return an object, or None if missing."""
    try:
        data: memoryview = yield Get(key)
    except ObjectNotFoundError:
        return None
    return data
