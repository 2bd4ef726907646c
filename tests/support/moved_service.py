"""A service that is killed -9 at one of its two endpoints and goes on at the other, in two ways.

`MovedService` is one data directory, whose process is started at the other endpoint. `OwnedService`
is a journal with an owner and a standby that takes over.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from types import TracebackType
from typing import Final

from tests.support.free_ports import free_port
from tests.support.journal_machines import JournalHome, Pair
from tests.support.service_process import ServiceProcess

__all__ = ["MovedService", "OwnedService"]

_LEASE_MS: Final = "1500"
_TAKEOVER_S_MAX: Final = 60.0


class MovedService:
    """Entering starts it at the first place; `move` kills it -9 and starts it at the other one."""

    def __init__(self, data_dir: Path, *arguments: str) -> None:
        self._data_dir = data_dir
        self._arguments = arguments
        self._ports = [free_port(), free_port()]
        self._process: ServiceProcess | None = None

    def __enter__(self) -> MovedService:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.__exit__(kind, error, trace)

    @property
    def endpoint(self) -> str:
        """Both places, as a client is given them."""
        return ",".join(f"http://127.0.0.1:{port}" for port in sorted(self._ports))

    def kill(self) -> None:
        """Kill it -9: nobody answers until `start`."""
        assert self._process is not None
        self._process.kill()
        self._process.__exit__(None, None, None)
        self._process = None
        self._ports.reverse()

    def start(self) -> None:
        """Start it; after `kill`, at the other place."""
        process = ServiceProcess(self._data_dir, "--port", str(self._ports[0]), *self._arguments)
        self._process = process.__enter__()

    def move(self) -> None:
        """Kill it at one place and start it at the other."""
        self.kill()
        self.start()


class OwnedService:
    """Entering starts an owner and its standby; `move` kills the owner -9.

    It comes back as the standby of the one that has taken over.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._home = JournalHome("file", folder=folder / "home")
        self._pair: Pair | None = None
        self._arguments = ("--lease-ms", _LEASE_MS, *arguments)
        self._owner = 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> OwnedService:
        with self._stack:
            self._stack.enter_context(self._home)
            pair = Pair(self._home, *self._arguments)
            self._pair = self._stack.enter_context(pair)
            pair.machines[0].start()
            pair.machines[0].wait_until_owner(_TAKEOVER_S_MAX)
            pair.machines[1].start("--standby")
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def endpoint(self) -> str:
        """Both machines, as a client is given them."""
        assert self._pair is not None
        return self._pair.endpoint

    def kill(self) -> None:
        """Kill the owner -9: nobody answers until the standby has taken over."""
        assert self._pair is not None
        self._pair.machines[self._owner].kill()
        self._owner = 1 - self._owner

    def pause(self) -> None:
        """Let the owner stand still, with its connections open, until the standby is the owner."""
        assert self._pair is not None
        process = self._pair.machines[self._owner].process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        self._owner = 1 - self._owner
        self._pair.machines[self._owner].wait_until_owner(_TAKEOVER_S_MAX)

    def start(self) -> None:
        """Wait for the takeover; then the other one stands by."""
        assert self._pair is not None
        self._pair.machines[self._owner].wait_until_owner(_TAKEOVER_S_MAX)
        self._pair.machines[1 - self._owner].start("--standby")

    def move(self) -> None:
        """Kill the owner and wait for the takeover."""
        self.kill()
        self.start()
