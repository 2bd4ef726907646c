"""`streamhouse serve` on a disk that fails. Run as a program, either of

    python -m tests.support.failing_disk KIND FIRST COUNT SERVE-ARGUMENT...
    python -m tests.support.failing_disk KIND while FILE SERVE-ARGUMENT...

Of the calls that `KIND` makes fail (see DISK_FAULTS) COUNT do, from the FIRST-th on; or all of them
as long as FILE exists. Calls are counted from when the service is ready, so that a
fault meets a service at work. Python's calls fail, which are all of the log's, the transactions'
and the tables'; RocksDB and SQLite have their own (see test_full_disk.py for a disk that is full).
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["DISK_FAULTS", "DiskFault", "FailingDisk", "command"]


class DiskFault(NamedTuple):
    """Which calls of module `os` fail, how, and whether the service goes on once they work."""

    calls: tuple[str, ...]
    error: int
    goes_on: bool


_NAMES: Final = ("rename", "replace", "mkdir", "link")

DISK_FAULTS: Final = {
    "disk-full": DiskFault(("pwritev", "open", *_NAMES), errno.ENOSPC, goes_on=True),
    "write-fails": DiskFault(("pwritev",), errno.EIO, goes_on=True),
    "sync-fails": DiskFault(("fdatasync",), errno.EIO, goes_on=False),
    "names-fail": DiskFault((*_NAMES, "fsync"), errno.EIO, goes_on=False),
    "undo-fails": DiskFault(("pwritev", "ftruncate"), errno.EIO, goes_on=False),
    "remove-fails": DiskFault(("unlink",), errno.EIO, goes_on=True),
    "all-fails": DiskFault(
        ("pwritev", "ftruncate", "fdatasync", "fsync", "unlink", "open", *_NAMES),
        errno.EIO,
        goes_on=False,
    ),
}
"""Kind -> what fails."""


def command(kind: str, first: str | int, count: str | int | Path) -> tuple[str, ...]:
    """Return what starts the service; see the module."""
    return ("-m", __name__, kind, str(first), str(count))


class FailingDisk:
    """Replaces functions of module `os` by some that fail when they are due."""

    def __init__(self, fault: DiskFault, is_due: Callable[[], bool]) -> None:
        self._fault = fault
        self._is_due = is_due
        self._random = random.Random(0)

    def install(self) -> None:
        """Begin to fail."""
        for name in self._fault.calls:
            setattr(os, name, self._failing(name, getattr(os, name)))

    def _failing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any, **kwargs: Any) -> Any:
            # Only what makes a file takes room.
            if (name != "open" or args[1] & os.O_CREAT) and self._is_due():
                if name == "pwritev":
                    self._tear(call, *args)
                raise OSError(self._fault.error, os.strerror(self._fault.error))
            return call(*args, **kwargs)

        return failing

    def _tear(self, call: Callable[..., Any], descriptor: int, buffers: Any, position: int) -> None:
        """Write some first part of what is refused, as a disk does that fills up."""
        data = b"".join(buffers)
        if part := data[: self._random.randint(0, len(data))]:
            call(descriptor, [part], position)


def counted(first: int, count: int) -> Callable[[], bool]:
    """Return what is true for `count` calls from the `first`-th on."""
    # next() of a counter is atomic: many threads meet here.
    reached = itertools.count(1)
    return lambda: first <= next(reached) < first + count


def main(kind: str, first: str, count: str, *arguments: str) -> None:
    from streamhouse.cli import main as streamhouse
    from streamhouse.cli.tuned_malloc import restart_with_tuned_malloc

    # `serve` does it first thing; here the service is imported before.
    restart_with_tuned_malloc()
    from streamhouse.storage_service.server import listener

    is_due = Path(count).exists if first == "while" else counted(int(first), int(count))
    run = listener.run_service

    def run_failing(
        config: Any, *, on_ready: Callable[[str], Callable[[], None]], **options: Any
    ) -> None:
        def fail_when_ready(endpoint: str) -> Callable[[], None]:
            FailingDisk(DISK_FAULTS[kind], is_due).install()
            return on_ready(endpoint)

        run(config, on_ready=fail_when_ready, **options)

    setattr(listener, "run_service", run_failing)  # noqa: B010 - it is looked up at its call
    sys.argv = ["streamhouse", "serve", *arguments]
    streamhouse()


if __name__ == "__main__":
    main(*sys.argv[1:])
