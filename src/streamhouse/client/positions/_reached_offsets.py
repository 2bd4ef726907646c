"""What a log had below the offsets at which reading goes on.

Only a service that shows rows before its journal has them tells it: should it lose rows together
with its machine, others get their offsets, and nobody must take them for the rows that follow.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

__all__ = ["ReachedOffsets"]

_OFFSETS_MAX: Final = 10_000


class ReachedOffsets:
    """Fingerprints by table, bucket and offset, the latest of them; any thread."""

    def __init__(self) -> None:
        self._fingerprints: OrderedDict[tuple[str, int, int], str] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, path: str, reached: Mapping[int, tuple[int, str]]) -> None:
        """Remember bucket -> (offset, fingerprint), as an answer says."""
        with self._lock:
            for bucket, (offset, fingerprint) in reached.items():
                self._fingerprints[path, bucket, offset] = fingerprint
            while len(self._fingerprints) > _OFFSETS_MAX:
                self._fingerprints.popitem(last=False)

    def forget(self, path: str, offsets: Mapping[int, int]) -> None:
        """Forget what was below these offsets: who begins to read there goes on from nothing."""
        with self._lock:
            for bucket, offset in offsets.items():
                self._fingerprints.pop((path, bucket, offset), None)

    def forget_table(self, path: str) -> None:
        """Forget a table that was created again."""
        with self._lock:
            for key in [key for key in self._fingerprints if key[0] == path]:
                del self._fingerprints[key]

    def at(self, path: str, offsets: Mapping[int, int]) -> dict[int, str]:
        """Return bucket -> fingerprint, of the buckets whose is known at its offset."""
        # Mostly there are none, of any.
        if not self._fingerprints:
            return {}
        found = {b: self._fingerprints.get((path, b, offset)) for b, offset in offsets.items()}
        return {bucket: said for bucket, said in found.items() if said is not None}
