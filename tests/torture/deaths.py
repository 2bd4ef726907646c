"""How a life of the service ends, and what starts a service that ends so."""

from __future__ import annotations

import random
from typing import Final, NamedTuple

from tests.support import failing_disk
from tests.support.failing_disk import DISK_FAULTS
from tests.torture.doomed_service import SERVICE_STEPS

__all__ = ["Death", "choose_death"]


class Death(NamedTuple):
    """`kind` is for the report; `command` starts the service, None as usual.

    A life `by_itself` ends at a step; another after `seconds`, by SIGTERM if it `is_clean`, else by
    kill -9. If it `goes_on`, the service must be well before, whatever its disk did.
    """

    kind: str
    command: tuple[str, ...] | None
    seconds: float
    by_itself: bool = False
    is_clean: bool = False
    goes_on: bool = True


_STEP_WAIT_S: Final = 4.0


def choose_death(chance: random.Random) -> Death:
    """Draw one."""
    draw = chance.random()
    seconds = chance.uniform(0.05, 2.0)
    if draw < 0.15:
        return Death("kill at random", None, seconds)
    if draw < 0.25:
        return Death("SIGTERM", None, seconds, is_clean=True)
    if draw < 0.45:
        kind = chance.choice(sorted(DISK_FAULTS))
        fault = DISK_FAULTS[kind]
        first = chance.choice((1, 10, 50, 200))
        count = chance.choice((1, 3, 30) if fault.goes_on else (1, 3, 1_000))
        command = failing_disk.command(kind, first, count)
        return Death(kind, command, seconds + 1.0, goes_on=fault.goes_on)
    step = chance.choice(sorted(SERVICE_STEPS))
    count = chance.choice((1, 1, 2, 5, 20))
    command = ("-m", "tests.torture.doomed_service", step, str(count))
    return Death(step, command, _STEP_WAIT_S, by_itself=True)
