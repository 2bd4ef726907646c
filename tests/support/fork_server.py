"""Forks Python programs off one process that has imported what they need. Run as a program:

    python -m tests.support.fork_server LISTENER LIFE MODULE...

Importing the service takes 0.9 s of a core, and the tests start it hundreds of times; Spark starts
a Python worker for each step of a plan. A connection to the socket `LISTENER` is one request: a
JSON object `{"arguments": ["-c" | "-m", text, ...], "environment": {...}, "directory": ...}`
behind its length, with four descriptors: stdin, stdout, stderr, and where the exit code goes as a
line once the program has ended. The answer is the program's process id. The server itself runs
nothing of the modules that it has imported, and ends when the other end of the pipe `LIFE` does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
import types
import warnings
from typing import Any, Final

from tests.support.forked_python import LENGTH

__all__: list[str] = []

DESCRIPTORS: Final = 4


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Return the next `size` bytes; fewer if the other end closed before."""
    received = bytearray()
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            break
        received += part
    return bytes(received)


class _Child(Exception):
    """This is the forked process: run the request."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request


class _Server:
    def __init__(self, listener: socket.socket, life: int) -> None:
        self._listener = listener
        self._life = life
        self._pid = os.getpid()
        self._exit_codes_to: dict[int, int] = {}
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())

    def serve(self) -> None:
        """Fork for each request until there are no more; raises `_Child` in the forked process."""
        while self._life not in select.select([self._listener, self._life], [], [])[0]:
            connection, _ = self._listener.accept()
            with connection:
                try:
                    self._answer(connection)
                except _Child:
                    raise
                except Exception:  # noqa: BLE001
                    # One request that fails (its sender was killed, no more processes are
                    # allowed) must not end the server, which all tests of a process share.
                    traceback.print_exc()

    def _answer(self, connection: socket.socket) -> None:
        head, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, DESCRIPTORS)
        try:
            head += _receive_exactly(connection, LENGTH.size - len(head))
            size = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else 0
            body = _receive_exactly(connection, size)
            # The sender may have been killed.
            if not body or len(body) < size or len(descriptors) < DESCRIPTORS:
                return
            request = json.loads(body)
            # A program that ends at once must be known before it is reaped.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
            try:
                pid = os.fork()
                if not pid:
                    self._become_child(descriptors)
                    raise _Child(request)
                self._exit_codes_to[pid] = descriptors.pop()
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        finally:
            if os.getpid() == self._pid:
                for descriptor in descriptors:
                    os.close(descriptor)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(LENGTH.pack(pid))

    def _reap(self) -> None:
        while self._exit_codes_to:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            descriptor = self._exit_codes_to.pop(pid)
            # Nobody reads it if the tests have ended before.
            with contextlib.suppress(BrokenPipeError):
                os.write(descriptor, b"%d\n" % os.waitstatus_to_exitcode(status))
            os.close(descriptor)

    def _become_child(self, descriptors: list[int]) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        self._listener.close()
        os.close(self._life)
        for number, descriptor in enumerate(descriptors[:-1]):
            os.dup2(descriptor, number)
        for descriptor in (*descriptors, *self._exit_codes_to.values()):
            os.close(descriptor)


def _run(request: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path += [path for path in paths if path and path not in sys.path]
    kind, text, *rest = request["arguments"]
    if kind == "-m":
        sys.argv = [text, *rest]
        runpy.run_module(text, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *rest]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(text, "<string>", "exec"), sys.modules["__main__"].__dict__)


def main(listener: str, life: str, *modules: str) -> None:
    # The tests get the signal too, and end this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in modules:
        importlib.import_module(name)
    # The only other thread is the allocator's, which forks well.
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)
    # No forked process walks, and so copies, what all of them have.
    gc.collect()
    gc.freeze()
    try:
        with socket.socket(fileno=int(listener)) as opened:
            _Server(opened, int(life)).serve()
    except _Child as child:
        request = child.request
    else:
        return
    _run(request)


if __name__ == "__main__":
    main(*sys.argv[1:])
