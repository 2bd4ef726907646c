"""A service put together and taken down: whatever fails, all the rest is closed."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamhouse.core.errors import InvalidRequestError
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.door_table import doors_of
from streamhouse.storage_service.server.doors import Door, Doors
from streamhouse.storage_service.server.listener import run_service

STEPS = ("open", "control_routes", "listen", "stop_listening", "close")


class BrokenError(Exception):
    """What a door raises."""


class _Door(Door):
    port_option = "--kafka-port"

    def __init__(self, name: str, steps: list[str], broken: str | None) -> None:
        self.port = 0
        self._name, self._steps, self._broken = name, steps, broken

    def _step(self, step: str) -> None:
        self._steps.append(f"{step} {self._name}")
        if step == self._broken:
            raise BrokenError(step)

    def open(self, *_: Any) -> None:
        self._step("open")

    def control_routes(self, *_: Any) -> None:
        self._step("control_routes")

    @contextlib.asynccontextmanager
    async def listen(self, *_: Any, **__: Any) -> AsyncIterator[str]:
        if self._broken == "listen":
            raise BrokenError("listen")
        self._step("listen")
        try:
            yield "serving"
        finally:
            self._step("stop_listening")

    def close(self) -> None:
        self._step("close")


def _stop(_: str) -> Callable[[], None]:
    os.kill(os.getpid(), signal.SIGTERM)
    return lambda: None


@pytest.fixture(autouse=True)
def _process() -> Iterator[None]:
    """Undo what a service changes in its process; no thread may stay."""
    interval, threads = sys.getswitchinterval(), set(threading.enumerate())
    yield
    sys.setswitchinterval(interval)
    gc.unfreeze()
    assert not set(threading.enumerate()) - threads


def _assert_unlocked(data_dir: Path) -> None:
    DataDirectory.open(data_dir).close()


@pytest.mark.parametrize("broken", STEPS)
def test_a_door_that_fails_keeps_nothing_from_being_closed(tmp_path: Path, broken: str) -> None:
    steps: list[str] = []
    doors = Doors(
        [_Door("first", steps, None), _Door("broken", steps, broken), _Door("last", steps, None)]
    )

    with pytest.raises(BrokenError, match=broken):
        run_service(ServiceConfig(data_dir=tmp_path, port=0), doors=doors, on_ready=_stop)

    # Each step that was begun is taken back, the last one first; the fixture sees the threads.
    for begin, end in (("open", "close"), ("listen", "stop_listening")):
        begun = [step.split()[1] for step in steps if step.startswith(f"{begin} ")]
        ended = [step.split()[1] for step in steps if step.startswith(f"{end} ")]
        assert ended == begun[::-1]
    _assert_unlocked(tmp_path)


@pytest.mark.parametrize("option", ["--port", "--kafka-port"])
def test_a_port_that_another_process_takes_during_the_start_is_named(
    tmp_path: Path, option: str
) -> None:
    """Both have bound the port, which the system allows until one of them listens."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        ports = {"--port": 0, "--kafka-port": 0, option: other.getsockname()[1]}
        config = ServiceConfig(
            data_dir=tmp_path, port=ports["--port"], kafka_port=ports["--kafka-port"]
        )

        class Meanwhile(Door):
            def open(self, *_: Any) -> None:
                other.listen()

        doors = Doors([*doors_of(config), Meanwhile()])

        refusal = f"Address already in use; choose another {option}"
        with pytest.raises(InvalidRequestError, match=refusal):
            run_service(config, doors=doors, on_ready=_stop)
    _assert_unlocked(tmp_path)
