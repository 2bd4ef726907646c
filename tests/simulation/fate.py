"""Where the life of a program ends that kills itself."""

from __future__ import annotations

import os
import signal


class Fate:
    """Kills the process when it has passed `point` a number of times."""

    def __init__(self, point: str, passes: int) -> None:
        self.point = point
        self.passes = passes

    def reach(self, point: str) -> None:
        if point == self.point:
            self.passes -= 1
            if self.passes == 0:
                os.kill(os.getpid(), signal.SIGKILL)
