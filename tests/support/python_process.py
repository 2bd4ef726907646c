"""Python programs as processes of their own: forked by `fork_server` in tests, else executed.

A forked program is a process like any other: it has its own id and memory, is killed with -9, and
ends with an exit code. It has not imported its modules itself, and was not executed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from streamhouse.cli.tuned_malloc import TUNED_MALLOC
from tests.support.fork_server import LENGTH, receive_exactly

__all__ = ["ForkedProcess", "end_forking", "fork_from_now_on", "run_python", "start_python"]

_ROOT: Final = Path(__file__).parents[2]
# Memory is as `serve` wants it, which would execute itself anew else; and no thread is started.
_SERVER_ENVIRONMENT: Final = {**TUNED_MALLOC, "OPENBLAS_NUM_THREADS": "1"}


class ForkedProcess:
    """A forked program, with what `subprocess.Popen` has."""

    def __init__(self, pid: int, exit_code: int, stdout: BinaryIO | None) -> None:
        self.pid: Final = pid
        self.stdout: Final = stdout
        self.returncode: int | None = None
        self._exit_code = exit_code
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, or None while the program runs."""
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raises `subprocess.TimeoutExpired`."""
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the program has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._exit_code], [], [], timeout)[0]:
            with self._lock:
                if self.returncode is None:
                    line = os.read(self._exit_code, 16)
                    os.close(self._exit_code)
                    assert line.endswith(b"\n"), "the server that forks programs is gone"
                    self.returncode = int(line)
        return self.returncode


class _ForkServer:
    """The server, started with the first program."""

    def __init__(self) -> None:
        self._connection, other = socket.socketpair()
        environment = {**os.environ, **_SERVER_ENVIRONMENT}
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                cwd=_ROOT,
                env=environment,
                pass_fds=[other.fileno()],
            )
        self._lock = threading.Lock()

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], out: int, err: int
    ) -> tuple[int, int]:
        """Fork a program; return its process id and where its exit code will be read."""
        request = json.dumps(
            {
                "arguments": [str(argument) for argument in arguments],
                "environment": {**environment, **TUNED_MALLOC},
                "directory": str(Path.cwd()),
            }
        ).encode()
        exit_code, exit_code_to = os.pipe()
        try:
            with self._lock, Path(os.devnull).open("rb") as nothing:
                given = [nothing.fileno(), out, err, exit_code_to]
                socket.send_fds(self._connection, [LENGTH.pack(len(request))], given)
                self._connection.sendall(request)
                answer = receive_exactly(self._connection, LENGTH.size)
            assert len(answer) == LENGTH.size, "the server that forks programs is gone"
        except BaseException:
            os.close(exit_code)
            raise
        finally:
            os.close(exit_code_to)
        return LENGTH.unpack(answer)[0], exit_code

    def end(self) -> None:
        """Close the socket and wait until the server has ended; programs it forked go on."""
        self._connection.close()
        self._process.wait(60)


_server: _ForkServer | None = None
_may_fork = False


def fork_from_now_on() -> None:
    """Fork programs instead of executing them; a process calls it that runs tests."""
    global _may_fork
    _may_fork = True


def end_forking() -> None:
    """End the server, if there is one."""
    global _may_fork, _server
    server, _server, _may_fork = _server, None, False
    if server is not None:
        server.end()


def start_python(
    arguments: Sequence[str],
    *,
    stderr: int,
    env: Mapping[str, str] | None = None,
    is_executed: bool = False,
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start `python ARGUMENT...` (-c or -m) with a pipe as stdout.

    It is forked if `fork_from_now_on` was called, but not if it must be as a user starts it.
    """
    environment = {**os.environ, **(env or {})}
    if is_executed or not _may_fork:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
        )
    read_end, write_end = os.pipe()
    try:
        pid, exit_code = _running_server().start(arguments, environment, write_end, stderr)
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    return ForkedProcess(pid, exit_code, os.fdopen(read_end, "rb"))


def run_python(
    arguments: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENT...` (-c or -m) to its end; return the exit code and what it said."""
    with tempfile.TemporaryFile() as err:
        process = start_python(arguments, stderr=err.fileno(), env=env)
        assert process.stdout is not None
        with process.stdout as out:
            killer = threading.Timer(timeout_s, process.kill)
            killer.start()
            try:
                said = out.read().decode()
                code = process.wait(timeout_s)
            finally:
                killer.cancel()
        err.seek(0)
        return subprocess.CompletedProcess(list(arguments), code, said, err.read().decode())


def _running_server() -> _ForkServer:
    global _server
    if _server is None:
        _server = _ForkServer()
    return _server
