"""Machines that die at whatever object they store: the next one shows what was acknowledged.

Each machine is a process, which dies as one; the next has its disk, an older copy of a disk, or
none. Disks get full while a directory is made what the journal says, and have bits that flipped.
`make thorough` has hundreds of machines, else there are a few.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.python_process import run_python

_IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60) if _IS_THOROUGH else range(2))
def test_what_was_acknowledged_outlives_machines(tmp_path: Path, seed: int) -> None:
    count = 12 if _IS_THOROUGH else 5

    done = run_python(
        ["-m", "tests.property.machines.machine_row", str(tmp_path), str(seed), str(count)],
        timeout_s=1_000,
    )

    assert done.returncode == 0, f"seed {seed}: {done.stderr[-8_000:]}"
