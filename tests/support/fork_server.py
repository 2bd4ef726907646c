"""Forks Python programs off one process that has imported what they need. Run as a program:

    python -m tests.support.fork_server SOCKET-DESCRIPTOR

Importing the service takes 0.9 s of a core, and the tests start it hundreds of times. A request is
a JSON object `{"arguments": ["-c" | "-m", text, ...], "environment": {...}, "directory": ...}`
behind its length, with four descriptors: stdin, stdout, stderr, and where the exit code goes as a
line once the program has ended. The answer is the program's process id. The server itself runs
nothing of what it has imported, and ends when its socket is closed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import sys
import types
import warnings
from typing import Any, Final

__all__ = ["DESCRIPTORS", "LENGTH", "receive_exactly"]

LENGTH: Final = struct.Struct("!I")
DESCRIPTORS: Final = 4

# What `serve`, tiering and the other commands import sooner or later.
_IMPORTED: Final = (
    "streamhouse.cli.alter",
    "streamhouse.cli.backup",
    "streamhouse.cli.check",
    "streamhouse.cli.dump",
    "streamhouse.cli.import_table",
    "streamhouse.cli.restore",
    "streamhouse.cli.serve",
    "streamhouse.client",
    "streamhouse.connector.plan.lake_bucket",
    "streamhouse.storage_service.lake.catalogs.open_catalog",
    "streamhouse.storage_service.rest_catalog.rest_api",
    "streamhouse.storage_service.server.listener",
    "streamhouse.tiering.worker.embedded",
    "pyiceberg.catalog.rest",
    "pyiceberg.catalog.sql",
    "pyiceberg.io.pyarrow",
)


def receive_exactly(connection: socket.socket, size: int) -> bytes:
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
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._exit_codes_to: dict[int, int] = {}
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())

    def serve(self) -> None:
        """Fork for each request until there are no more; raises `_Child` in the forked process."""
        while True:
            head, descriptors, _, _ = socket.recv_fds(self._connection, LENGTH.size, DESCRIPTORS)
            if not head:
                return
            head += receive_exactly(self._connection, LENGTH.size - len(head))
            request = json.loads(receive_exactly(self._connection, LENGTH.unpack(head)[0]))
            # A program that ends at once must be known before it is reaped.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
            pid = os.fork()
            if not pid:
                self._become_child(descriptors)
                raise _Child(request)
            for descriptor in descriptors[:-1]:
                os.close(descriptor)
            self._exit_codes_to[pid] = descriptors[-1]
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            self._connection.sendall(LENGTH.pack(pid))

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
        self._connection.close()
        for number, descriptor in enumerate(descriptors[:-1]):
            os.dup2(descriptor, number)
        for descriptor in (*descriptors, *self._exit_codes_to.values()):
            os.close(descriptor)


def _run(request: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    kind, text, *rest = request["arguments"]
    if kind == "-m":
        sys.argv = [text, *rest]
        runpy.run_module(text, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *rest]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(text, "<string>", "exec"), sys.modules["__main__"].__dict__)


def main(descriptor: str) -> None:
    # The tests get the signal too, and close the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in _IMPORTED:
        importlib.import_module(name)
    # The only other thread is the allocator's, which forks well.
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)
    # No forked process walks, and so copies, what all of them have.
    gc.collect()
    gc.freeze()
    try:
        with socket.socket(fileno=int(descriptor)) as connection:
            _Server(connection).serve()
    except _Child as child:
        request = child.request
    else:
        return
    _run(request)


if __name__ == "__main__":
    main(*sys.argv[1:])
