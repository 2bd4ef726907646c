"""malloc tuned for large bodies, for a process that has just started.

With glibc's defaults every large body is mapped and unmapped, page by page: uploads are 3 to 5
times slower. glibc reads the variables only when a process starts, hence the exec. The exec comes
before the heavy imports: otherwise they would run twice.
"""

from __future__ import annotations

import os
import platform
import sys
from typing import Final

__all__ = ["TUNED_MALLOC", "restart_with_tuned_malloc"]

TUNED_MALLOC: Final = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
}
"""The variables and their values, in bytes."""


def restart_with_tuned_malloc() -> None:
    """Replace this process by itself with malloc tuned; the process id stays.

    Returns if there is nothing to tune: another libc, or variables that are already set.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in TUNED_MALLOC):
        return
    os.environ.update(TUNED_MALLOC)
    os.execv(sys.executable, sys.orig_argv)
