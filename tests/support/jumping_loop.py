"""An event loop whose time jumps to the next timer when nothing else is to be done."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any, Final

__all__ = ["JumpingLoop"]


# Threads get so much real time before each jump.
_REAL_S: Final = 0.002


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]  # differs by system
    """Lets the time pass at once instead of waiting for a timer, from `jumps` on."""

    def __init__(self) -> None:
        super().__init__()
        self.jumps = False
        self.jumped_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if not (self.jumps and timeout):
            return super().select(timeout)
        ready = super().select(min(timeout, _REAL_S))
        if not ready:
            self.jumped_s += timeout
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """See the module. A wait without any timer waits for sockets and threads as usual."""

    def __init__(self) -> None:
        self._jumping = _Selector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the seconds that have passed, those of the jumps included."""
        return super().time() + self._jumping.jumped_s

    def jump(self) -> None:
        """Jump from now on."""
        self._jumping.jumps = True
