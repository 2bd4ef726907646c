"""How long to wait before something that failed is tried again.

Only the lengths are here. Who waits knows how: on an event, on a flag that stops it, or asleep.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

__all__ = ["Backoff"]

# Beyond this many doublings every wait is at its bound.
_DOUBLINGS_MAX: Final = 30
# Its own: a program that seeds the common one repeats itself, whatever waits on other threads.
_RANDOM: Final = random.Random()


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Waits that double with each failure in a row, from `first_s` to at most `most_s`."""

    first_s: float
    most_s: float

    def after(self, failures: int) -> float:
        """Return the wait, in seconds, after so many failures in a row; 0 after none."""
        if failures < 1:
            return 0.0
        return min(self.first_s * 2.0 ** min(failures - 1, _DOUBLINGS_MAX), self.most_s)

    def jittered_after(self, failures: int) -> float:
        """Return the same wait, shortened by up to half at random.

        So those who failed together do not come back together.
        """
        return self.after(failures) * _RANDOM.uniform(0.5, 1.0)
