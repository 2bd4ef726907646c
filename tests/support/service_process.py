"""A real `streamhouse serve` process: started on a free port, stopped by its own id."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from tests.support.python_process import ForkedProcess, start_python

__all__ = ["DiedAtStart", "ServiceProcess"]

_READY_PREFIX: Final = "streamhouse listening on "
_STANDBY_PREFIX: Final = "streamhouse standing by on "
_KAFKA_PREFIX: Final = "streamhouse serving Kafka clients on "
_COMMAND: Final = ("-c", "from streamhouse.cli import main; main()", "serve")


class DiedAtStart(AssertionError):
    """The service process ended before it served."""


class ServiceProcess:
    """One service process on `data_dir`; entering waits until it serves, leaving ends it.

    Restarting is entering a second one on the same directory. `kill` is kill -9 and leaves the
    directory as a crash would; `terminate` is a clean stop. Both may be called before leaving.
    `command` is the arguments of Python before those of `serve`. Entering a standby waits until it
    follows; `wait_ready` then waits until it has taken over. Tests fork the process with
    everything imported, unless `is_executed`.
    """

    def __init__(
        self,
        data_dir: Path | str,
        *extra_args: str,
        env: Mapping[str, str] | None = None,
        command: Sequence[str] = _COMMAND,
        start_timeout_s: float = 120.0,
        stop_timeout_s: float = 60.0,
        is_executed: bool = False,
    ) -> None:
        self._arguments = [*command, "--data-dir", str(data_dir)]
        if "--port" not in extra_args:
            self._arguments += ["--port", "0"]
        self._arguments += extra_args
        self._env = env
        self._is_executed = is_executed
        self._is_standby = "--standby" in extra_args
        self._has_kafka = "--kafka-port" in extra_args
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._log: Path | None = None
        self._unread = b""
        self.endpoint = ""
        self.kafka_address = ""
        """HOST:PORT of the Kafka door, if there is one; of several shards all, with commas."""

    def __enter__(self) -> ServiceProcess:
        log_fd, log_name = tempfile.mkstemp(prefix="streamhouse-serve-", suffix=".log")
        self._log = Path(log_name)
        try:
            # Output goes to a file: an unread pipe would stop a talkative service.
            self._process = start_python(
                self._arguments, stderr=log_fd, env=self._env, is_executed=self._is_executed
            )
        finally:
            os.close(log_fd)
        try:
            self.endpoint = self._read_line(
                _STANDBY_PREFIX if self._is_standby else _READY_PREFIX, self._start_timeout_s
            )
            if self._has_kafka and not self._is_standby:
                self._read_kafka_address(self._start_timeout_s)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._process is not None:
            sys.stderr.write(f"---- log of the service ----\n{self.log_text()[-8_000:]}\n")
        self._close()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._running().pid

    @property
    def anonymous_bytes(self) -> int:
        """The anonymous memory of the process: mapped log files are the page cache's."""
        lines = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii").splitlines()
        (line,) = (line for line in lines if line.startswith("RssAnon:"))
        return int(line.split()[1]) << 10

    def kill(self) -> None:
        """Kill -9 and wait until the process is gone."""
        process = self._running()
        process.kill()
        process.wait(self._stop_timeout_s)

    def terminate(self) -> int:
        """Send SIGTERM, wait for the end, return the exit code."""
        return self.stop_with(signal.SIGTERM)

    def stop_with(self, signal_number: signal.Signals) -> int:
        """Send a signal, wait for the end, return the exit code."""
        process = self._running()
        process.send_signal(signal_number)
        return process.wait(self._stop_timeout_s)

    def send(self, signal_number: signal.Signals) -> None:
        """Send a signal and do not wait."""
        self._running().send_signal(signal_number)

    def has_ended(self) -> bool:
        """Whether the process has ended by itself."""
        return self._running().poll() is not None

    def wait(self) -> int:
        """Wait for the process to end by itself; return the exit code."""
        return self._running().wait(self._stop_timeout_s)

    def wait_for_ever(self) -> None:
        """Return when the process has ended, by itself or killed: for a thread beside a test."""
        self._running().wait(None)

    def log_text(self) -> str:
        """What the process has written to stderr so far."""
        return "" if self._log is None else self._log.read_text("utf-8", "replace")

    def _running(self) -> subprocess.Popen[bytes] | ForkedProcess:
        assert self._process is not None, "the service process is not started"
        return self._process

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until a standby has taken over and serves."""
        assert self._is_standby
        self._read_line(_READY_PREFIX, timeout_s or self._start_timeout_s)
        if self._has_kafka:
            self._read_kafka_address(timeout_s or self._start_timeout_s)

    def _read_kafka_address(self, timeout_s: float) -> None:
        self.kafka_address = self._read_line(_KAFKA_PREFIX, timeout_s)

    def _read_line(self, prefix: str, timeout_s: float) -> str:
        stdout = self._running().stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            # Several lines may come at once: what is behind the first one is kept.
            while b"\n" not in self._unread:
                if not selector.select(timeout_s):
                    raise AssertionError(
                        f"no line '{prefix}' in {timeout_s} s; log:\n{self.log_text()}"
                    )
                if not (more := os.read(stdout.fileno(), 1 << 16)):
                    break
                self._unread += more
            first, _, self._unread = self._unread.partition(b"\n")
            line = first.decode()
        if not line.startswith(prefix):
            self._running().wait(self._stop_timeout_s)
            raise DiedAtStart(
                f"the service ended with code {self._running().returncode} instead of serving;"
                f" stdout: {line!r}; log:\n{self.log_text()}"
            )
        return line.removeprefix(prefix)

    def _close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(self._stop_timeout_s)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if self._log is not None:
            with contextlib.suppress(FileNotFoundError):
                self._log.unlink()
            self._log = None
