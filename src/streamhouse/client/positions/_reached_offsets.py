"""Fingerprints of the log below the offsets at which reading goes on.

Only a service that shows rows before their journaling sends fingerprints. If the service loses rows
together with the machine, new rows get the same offsets. By the fingerprint a reader sees the
broken history.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

__all__ = ["ReachedOffsets"]

_OFFSETS_MAX: Final = 10_000


class ReachedOffsets:
    """The latest fingerprints, by table, bucket and offset. Thread-safe."""

    def __init__(self) -> None:
        self._fingerprints: OrderedDict[tuple[str, int, int], str] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, path: str, reached: Mapping[int, tuple[int, str]]) -> None:
        """Remember bucket -> (offset, fingerprint) from an answer."""
        with self._lock:
            for bucket, (offset, fingerprint) in reached.items():
                self._fingerprints[path, bucket, offset] = fingerprint
            while len(self._fingerprints) > _OFFSETS_MAX:
                self._fingerprints.popitem(last=False)

    def forget(self, path: str, offsets: Mapping[int, int]) -> None:
        """Forget the fingerprints at these offsets: a new reader there has read nothing before."""
        with self._lock:
            for bucket, offset in offsets.items():
                self._fingerprints.pop((path, bucket, offset), None)

    def forget_table(self, path: str) -> None:
        """Forget a table that was created again."""
        with self._lock:
            for key in [key for key in self._fingerprints if key[0] == path]:
                del self._fingerprints[key]

    def at(self, path: str, offsets: Mapping[int, int]) -> dict[int, str]:
        """Return bucket -> fingerprint, for the buckets with a fingerprint at the offset."""
        # The common case: no fingerprints at all.
        if not self._fingerprints:
            return {}
        fingerprints = {
            b: self._fingerprints.get((path, b, offset)) for b, offset in offsets.items()
        }
        return {
            bucket: fingerprint
            for bucket, fingerprint in fingerprints.items()
            if fingerprint is not None
        }
