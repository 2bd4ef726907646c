"""A process beside this one ends with this one, at any moment of its life."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

_PARENT = """
import sys
from streamhouse.core.child_process import start_module
print(start_module("loads_for_long", (), ends_with_parent=True).pid, flush=True)
sys.stdin.read()
"""


def _runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text("ascii", "replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the signal is Linux's")
@pytest.mark.parametrize("waits", [True, False])
def test_a_process_whose_module_is_loading_ends_with_its_parent(
    tmp_path: Path, waits: bool
) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "loads_for_long.py").write_text(
        f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen(
        (sys.executable, "-c", _PARENT),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        if waits:
            wait_until(begun.exists, "a module that is loading")
        parent.kill()
        parent.wait()

        wait_until(lambda: not _runs(child), "the end of the child")
