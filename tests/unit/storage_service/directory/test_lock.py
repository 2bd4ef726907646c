"""The lock of a data directory, while children of a dead owner still have its file."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from streamhouse.storage_service.directory.data_directory import lock

HOLDER = """
import fcntl, sys
fcntl.flock(int(sys.argv[1]), fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("operation", [fcntl.LOCK_EX, fcntl.LOCK_SH])
def test_children_of_a_dead_owner_are_waited_for(tmp_path: Path, operation: int) -> None:
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    (tmp_path / "LOCK").write_bytes(dead.stdout)
    held = os.open(tmp_path / "LOCK", os.O_RDWR)
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(held)],
        pass_fds=[held],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    os.close(held)

    ours = os.open(tmp_path / "LOCK", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(ours, operation | fcntl.LOCK_NB)
    waiting = threading.Thread(target=lock, args=(ours, operation))
    waiting.start()
    child.stdin.close()
    child.wait()
    waiting.join(30)
    assert not waiting.is_alive()
    child.stdout.close()
    os.close(ours)


@pytest.mark.parametrize("operation", [fcntl.LOCK_EX, fcntl.LOCK_SH])
def test_a_living_owner_is_not_waited_for(tmp_path: Path, operation: int) -> None:
    (tmp_path / "LOCK").write_text(str(os.getpid()))
    owner, other = (os.open(tmp_path / "LOCK", os.O_RDWR) for _ in range(2))
    fcntl.flock(owner, fcntl.LOCK_EX)

    with pytest.raises(BlockingIOError):
        lock(other, operation)
    os.close(owner)
    os.close(other)
