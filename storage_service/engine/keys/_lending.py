"""Something open that other threads use, until its own thread closes it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

from streamhouse.core.errors import UnavailableError

__all__ = ["Lending"]


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
