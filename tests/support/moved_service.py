"""One service that has two places: killed at one, it starts at the other. So does a takeover look
to its clients, which have both endpoints.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from tests.support.journal_machines import free_port
from tests.support.service_process import ServiceProcess

__all__ = ["MovedService"]


class MovedService:
    """Entering starts it at the first place; `move` kills it -9 and starts it at the other one."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
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
        process = ServiceProcess(self._data_dir, "--port", str(self._ports[0]))
        self._process = process.__enter__()

    def move(self) -> None:
        """Kill it at one place and start it at the other."""
        self.kill()
        self.start()
