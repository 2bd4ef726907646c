"""Giving memory back to the system after a burst of large bodies and answers.

malloc is tuned to keep freed memory, because large bodies are many times faster with kept memory.
The memory of a burst is given back after its end: during the burst the next body needs the memory.
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
    """Decides when to give memory back.

    `held_bytes` returns the bytes in bodies and answers now, `total_bytes` the sum so far.
    """

    def __init__(self, *, held_bytes: Callable[[], int], total_bytes: Callable[[], int]) -> None:
        self._held_bytes = held_bytes
        self._total_bytes = total_bytes
        self._bytes_at_return = 0
        self._quiet_looks = 0

    def is_due(self) -> bool:
        """Whether a burst has ended since the last return of memory; call this once per look."""
        total_bytes = self._total_bytes()
        if self._held_bytes() > _QUIET_BYTES or total_bytes - self._bytes_at_return < _BURST_BYTES:
            self._quiet_looks = 0
            return False
        self._quiet_looks += 1
        if self._quiet_looks < _QUIET_LOOKS:
            return False
        self._quiet_looks, self._bytes_at_return = 0, total_bytes
        return True


def give_back() -> None:
    """Give unused memory of Arrow and malloc back to the system. On any thread."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        # Only glibc has `malloc_trim`. The call releases the interpreter lock.
        trim(0)
    _logger.debug("event=memory_returned")
