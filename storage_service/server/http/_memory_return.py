"""Giving memory back to the system after a burst of large bodies and answers.

malloc is tuned to keep what is freed, because large bodies are many times faster so. What a burst
leaves is given back once it is over: while it goes on, the next body would ask for it again.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Final

import pyarrow as pa

__all__ = ["MEMORY_LOOK_MS", "MemoryReturn", "give_back"]

_logger = logging.getLogger(__name__)

MEMORY_LOOK_MS: Final = 2_000
_BURST_BYTES: Final = 128 << 20
_QUIET_BYTES: Final = 16 << 20
_QUIET_LOOKS: Final = 2


class MemoryReturn:
    """Says when. `held` is what bodies and answers hold now, `ever` what they ever did."""

    def __init__(self, *, held: Callable[[], int], ever: Callable[[], int]) -> None:
        self._held = held
        self._ever = ever
        self._ever_given_back = 0
        self._quiet_looks = 0

    def is_due(self) -> bool:
        """Whether a burst is over since the last time; call it once a look."""
        ever = self._ever()
        if self._held() > _QUIET_BYTES or ever - self._ever_given_back < _BURST_BYTES:
            self._quiet_looks = 0
            return False
        self._quiet_looks += 1
        if self._quiet_looks < _QUIET_LOOKS:
            return False
        self._quiet_looks, self._ever_given_back = 0, ever
        return True


def give_back() -> None:
    """Give what nobody uses back to the system: Arrow's pool and malloc's. On any thread."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        # Only glibc has it; it lets other threads run.
        trim(0)
    _logger.debug("event=memory_returned")
