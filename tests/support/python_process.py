"""Python programs as processes of their own: forked by `fork_server` in tests, else executed.

A forked program is a process like any other: it has its own id and memory, is killed with -9, and
ends with an exit code. It has not imported its modules itself, and was not executed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from streamhouse.cli.tuned_malloc import TUNED_MALLOC
from tests.support.forked_python import ask_to_fork

__all__ = [
    "ForkedProcess",
    "end_forking",
    "fork_from_now_on",
    "python_for_spark",
    "run_python",
    "start_python",
]

_ROOT: Final = Path(__file__).parents[2]
_FORKED_PYTHON: Final = Path(__file__).with_name("forked_python.py")
# Memory is as `serve` wants it, which would execute itself anew else; and no thread is started.
_SERVER_ENVIRONMENT: Final = {**TUNED_MALLOC, "OPENBLAS_NUM_THREADS": "1"}


class ForkedProcess:
    """A forked program, with what `subprocess.Popen` has."""

    def __init__(self, pid: int, exit_code: int, stdout: BinaryIO | None) -> None:
        self.pid: Final = pid
        self.stdout: Final = stdout
        self.returncode: int | None = None
        self._exit_code = exit_code
        # Not before: another thread may wait for it, and would wait for whatever file gets its
        # number. It stays readable, because its other end is closed.
        weakref.finalize(self, os.close, exit_code)
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
                    assert line.endswith(b"\n"), "the server that forks programs is gone"
                    self.returncode = int(line)
        return self.returncode


class _ForkServer:
    """A server that has imported these modules."""

    def __init__(self, imported: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fork-server-")
        self.address: Final = Path(self._folder.name) / "socket"
        self._imported = imported
        self._start_process()

    def _start_process(self) -> None:
        self.address.unlink(missing_ok=True)
        life, self._life = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.address))
            listener.listen(64)
            given = [listener.fileno(), life]
            arguments = [*map(str, given), *self._imported]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", *arguments],
                stdin=subprocess.DEVNULL,
                cwd=_ROOT,
                env={**os.environ, **_SERVER_ENVIRONMENT},
                pass_fds=given,
            )
        os.close(life)

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], out: int, err: int
    ) -> tuple[int, int]:
        """Fork a program; return its process id and where its exit code will be read."""
        with Path(os.devnull).open("rb") as nothing:
            return ask_to_fork(
                self.address,
                [str(argument) for argument in arguments],
                {**environment, **TUNED_MALLOC},
                (nothing.fileno(), out, err),
            )

    @functools.cached_property
    def launcher(self) -> Path:
        """A program that runs as Python does, and has it forked."""
        path = self.address.with_name("python")
        command = shlex.join(
            [sys.executable, "-SE", str(_FORKED_PYTHON), sys.executable, str(self.address)]
        )
        path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        path.chmod(0o700)
        return path

    def restart_if_ended(self) -> None:
        """Start another process at the same address if something has ended the server's."""
        if self._process.poll() is not None:
            code = self._process.returncode
            sys.stderr.write(f"a server that forks programs ended with {code}\n")
            os.close(self._life)
            self._start_process()

    def end(self) -> None:
        """End the server and wait until it has ended; programs it forked go on."""
        os.close(self._life)
        self._process.wait(60)
        self._folder.cleanup()


# What `serve`, tiering and the other commands import sooner or later.
_OF_PROGRAMS: Final = (
    "streamhouse.cli.client_commands.alter",
    "streamhouse.cli.server_commands.backup",
    "streamhouse.cli.server_commands.check",
    "streamhouse.cli.server_commands.dump",
    "streamhouse.cli.client_commands.import_table",
    "streamhouse.cli.server_commands.restore",
    "streamhouse.cli.server_commands.serve",
    "streamhouse.api.client",
    "streamhouse.reading.lake_only.lake_bucket",
    "streamhouse.lake.catalogs.open_catalog",
    "streamhouse.storage_service.rest_catalog.rest_api",
    "streamhouse.storage_service.server.listener",
    "streamhouse.tiering.worker.embedded",
    "pyiceberg.catalog.rest",
    "pyiceberg.catalog.sql",
    "pyiceberg.io.pyarrow",
)
# What Spark's Python workers import for a data source, and ours.
_OF_SPARK: Final = (
    "pyspark.sql.datasource_internal",
    "pyspark.sql.worker.write_into_data_source",
    "pyspark.worker",
    "streamhouse.connector.format.data_source",
    "streamhouse.reading.files.planner",
    "streamhouse.connector.stream._stream_reader",
    "streamhouse.connector.write._writers",
    "pyiceberg.catalog.sql",
    "pyiceberg.io.pyarrow",
)

_servers: dict[tuple[str, ...], _ForkServer] = {}
_may_fork = False


def fork_from_now_on() -> None:
    """Fork programs instead of executing them; a process calls it that runs tests."""
    global _may_fork
    _may_fork = True


def end_forking() -> None:
    """End the servers there are."""
    global _may_fork
    _may_fork = False
    while _servers:
        _servers.popitem()[1].end()


def python_for_spark() -> str:
    """Return what Spark is to start as Python: what forks, if programs may be forked."""
    return str(_running_server(_OF_SPARK).launcher) if _may_fork else sys.executable


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
        pid, exit_code = _running_server(_OF_PROGRAMS).start(
            arguments, environment, write_end, stderr
        )
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


def _running_server(imported: tuple[str, ...]) -> _ForkServer:
    if imported not in _servers:
        _servers[imported] = _ForkServer(imported)
    _servers[imported].restart_if_ended()
    return _servers[imported]
