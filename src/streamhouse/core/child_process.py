"""Processes of our own modules beside this one, which inherit descriptors and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

__all__ = ["end_module", "start_module"]

# Before the module loads, which takes seconds on a busy machine, the kernel knows that the end of
# the parent ends the process. A parent that has gone before is not the parent any more.
_ENDING_WITH_PARENT: Final = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    os._exit(0)
module = sys.argv[2]
del sys.argv[1:3]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def start_module(
    module: str, descriptors: tuple[int, ...], *, ends_with_parent: bool = False
) -> subprocess.Popen[bytes]:
    """Start `python -m module` with these descriptors, whose numbers are its arguments.

    With `ends_with_parent` the kernel kills the process at the end of the thread that has started
    the process; Linux only.
    """
    named = ("-c", _ENDING_WITH_PARENT, str(os.getpid())) if ends_with_parent else ("-m",)
    return subprocess.Popen(
        # With -P the working directory is no place of modules.
        (sys.executable, "-P", *named, module, *map(str, descriptors)),
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def end_module(process: subprocess.Popen[bytes], *, wait_s: float) -> None:
    """Wait for a process that was told to stop, and kill it if it does not. Blocking."""
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
