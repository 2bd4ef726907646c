"""Processes of our own modules beside this one, which inherit descriptors and nothing else."""

from __future__ import annotations

import subprocess
import sys

__all__ = ["end_module", "start_module"]


def start_module(module: str, descriptors: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Start `python -m module` with these descriptors, whose numbers are its arguments."""
    return subprocess.Popen(
        # With -P the working directory is no place of modules.
        (sys.executable, "-P", "-m", module, *map(str, descriptors)),
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
