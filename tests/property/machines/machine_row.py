"""Machines that live one after the other, each a process of its own. Run as a program:

    python -m tests.property.machines.machine_row ROOT SEED COUNT

`ROOT` is an empty directory, for disks, the store and what is to outlive machines. The program ends
with a failure unless all machines were as they must, and else says how they ended.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import sys
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.property.machines.machine_disks import DIED, FULL, REFUSED, flip_bit
from tests.property.machines.mortal_machine import COPIES, Life, live

__all__ = ["run_machines"]

_DEADLINE_S: Final = 60
_NAMES: Final = {0: "ended", DIED: "died", FULL: "full", REFUSED: "refused"}


def _end_of(root: Path, life: Life) -> int:
    """Fork a machine off this process, which has no other threads; return its exit code."""
    pid = os.fork()
    if not pid:
        try:
            live(root, life)
        finally:
            # It did not end itself, and this is not the program any more.
            traceback.print_exc()
            os._exit(1)
    ended = os.pidfd_open(pid)
    is_late = not select.select([ended], [], [], _DEADLINE_S)[0]
    os.close(ended)
    if is_late:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert not is_late, f"{life} neither ended nor died"
    return code


def _copies(root: Path) -> list[Path]:
    """Return the older copies of disks, the newest last."""
    found = [root / f"copy{number}" for number in range(COPIES)]
    return sorted(
        (path for path in found if path.exists()), key=lambda path: path.stat().st_ctime_ns
    )


def run_machines(root: Path, seed: int, *, count: int) -> Counter[str]:
    """Let machines live one after the other; return how often each end was met."""
    rng, ends = random.Random(seed), Counter[str]()
    for number in range(count):
        life = Life(
            name=rng.choice(["a", "a", "a", "b", f"new{number}"]),
            seed=rng.randrange(1 << 30),
            lives=rng.randrange(rng.choice([10, 60, 200, 1_000])),
            steps=rng.randrange(60),
        )
        disk, copies = root / life.name, _copies(root)
        if copies and rng.random() < 0.5:
            copy = rng.choice([copies[-1], *copies])
            shutil.rmtree(disk, ignore_errors=True)
            shutil.copytree(copy, disk)
            ends["copied"] += 1
        kind, flipped = rng.random(), ""
        if kind < 0.2:
            life = replace(life, full_after=rng.randrange(rng.choice([10, 60])))
        elif kind < 0.4 and disk.exists():
            flipped = flip_bit(disk, rng)
            life = replace(life, is_damaged=True, steps=0)
            ends["flipped"] += 1
        end = _end_of(root, life)
        allowed = {0, DIED}
        allowed |= {FULL} if life.full_after is not None else set()
        allowed |= {REFUSED} if life.is_damaged else set()
        assert end in allowed, f"seed {seed}, machine {number}: {life}, {flipped!r}: {end}"
        if life.is_damaged and end:
            # What to do is to replace such a disk.
            shutil.rmtree(disk)
        ends[_NAMES[end]] += 1
    # It stores what it must, and has a whole life.
    assert _end_of(root, Life(name="last", seed=seed, steps=5)) == 0, f"seed {seed}, the last one"
    return ends


if __name__ == "__main__":
    ends = run_machines(Path(sys.argv[1]), int(sys.argv[2]), count=int(sys.argv[3]))
    sys.stdout.write(f"{dict(ends)}\n")
