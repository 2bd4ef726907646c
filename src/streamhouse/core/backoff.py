"""The waiting times between retries after failures.

This module only computes the times. The caller waits: on an event, on a stop flag, or asleep.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

__all__ = ["Backoff"]

# Beyond this many doublings every wait is at its bound.
_DOUBLINGS_MAX: Final = 30
# A separate generator: a program which seeds the shared one gets the same numbers every time.
_RANDOM: Final = random.Random()


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Waits which double with each failure in a row, from `first_s` to at most `most_s`."""

    first_s: float
    most_s: float

    def after(self, failures: int) -> float:
        """Return the wait in seconds after this many failures in a row; 0 after none."""
        if failures < 1:
            return 0.0
        return min(self.first_s * 2.0 ** min(failures - 1, _DOUBLINGS_MAX), self.most_s)

    def jittered_after(self, failures: int) -> float:
        """Return the wait, shortened by up to half at random.

        The jitter separates the retries of callers which failed together.
        """
        return self.after(failures) * _RANDOM.uniform(0.5, 1.0)
