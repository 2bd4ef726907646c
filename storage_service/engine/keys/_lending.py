"""What the thread that follows a directory opens and closes, and other threads use meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Generic, Protocol, TypeVar

from streamhouse.core.errors import UnavailableError
from streamhouse.core.model.table import TablePath

__all__ = ["Lending", "TablesByPath"]


class _Table(Protocol):
    @property
    def path(self) -> TablePath: ...


_T = TypeVar("_T", bound=_Table)


class Lending:
    """Counts the uses in progress. Any thread."""

    def __init__(self, what: str) -> None:
        self._what: Final = what
        self._unused = threading.Condition()
        self._users = 0
        self._is_ended = False

    def check(self) -> None:
        """Raise `UnavailableError` after the end."""
        if self._is_ended:
            raise UnavailableError(f"{self._what} followed no longer")

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Use the thing within the context; raises as `check`."""
        with self._unused:
            self.check()
            self._users += 1
        try:
            yield
        finally:
            with self._unused:
                self._users -= 1
                self._unused.notify_all()

    def end(self) -> None:
        """Refuse further uses; return when the last use has ended."""
        with self._unused:
            self._is_ended = True
            self._unused.wait_for(lambda: not self._users)


class TablesByPath(Generic[_T]):
    """The tables to use. `by_path` is replaced as a whole: any thread may read the tables."""

    def __init__(self) -> None:
        self.by_path: Mapping[TablePath, _T] = {}
        self.on_change: Callable[[], None] = lambda: None
        """Called on the following thread after tables, or what they show, have changed."""

    def put(self, table: _T) -> None:
        """Show a table, in place of another one of the path."""
        if self.by_path.get(table.path) is not table:
            self.by_path = {**self.by_path, table.path: table}

    def forget(self, table: _T) -> None:
        """Show a table no longer by its path."""
        self.by_path = {path: other for path, other in self.by_path.items() if other is not table}
