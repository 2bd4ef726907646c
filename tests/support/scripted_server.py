"""A TCP server that does on each connection what a script says: answer, break off, keep still."""

from __future__ import annotations

import contextlib
import enum
import json
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

__all__ = ["Act", "ScriptedServer", "read_request"]


class Act(enum.Enum):
    """What a server does other than send bytes."""

    LISTEN = enum.auto()
    """Read a request and do nothing about it."""
    STALL = enum.auto()
    """Keep the connection open and send nothing, until the server is left."""
    RESET = enum.auto()
    """Cut the connection as a machine does that knows nothing of it."""
    CLOSE = enum.auto()


Script: TypeAlias = Sequence["bytes | Act | Callable[[socket.socket], None]"]


class ScriptedServer:
    """Plays `scripts`, one a connection in the order in which they are made.

    A step that is bytes reads a request and sends them; one that is a function is called with the
    connection. After its script a connection is closed. The last script is for all further
    connections. `requests` are those that came, each with its body; `connections` counts.

    Who asks for its health first, of a script that begins with an answer, is told `service_id`, and
    that is in no script; `health_requests` has it.
    """

    def __init__(
        self,
        *scripts: Script,
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        service_id: str = "one",
    ) -> None:
        self._scripts = scripts
        self._tls = tls
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        name = f"[{host}]" if ":" in host else host
        scheme = "http" if tls is None else "https"
        self.endpoint = f"{scheme}://{name}:{self._listener.getsockname()[1]}"
        """The URL to give to a client."""
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self.requests: list[bytes] = []
        self.connections = 0
        self.service_id = service_id
        self.health_requests: list[bytes] = []

    def __enter__(self) -> ScriptedServer:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        # Wakes the thread that accepts; closing alone does not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(60)

    def play(self, *scripts: Script) -> None:
        """Play these from now on: those of a server that has to know its own URL."""
        self._scripts = scripts

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                opened, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._play, opened, self._take_script())

    def _take_script(self) -> Script:
        script = self._scripts[min(self.connections, len(self._scripts) - 1)]
        self.connections += 1
        return script

    def _play(self, opened: socket.socket, script: Script) -> None:
        opened.settimeout(60)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            stack.callback(opened.close)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                opened = self._tls.wrap_socket(opened, server_side=True)
                stack.callback(opened.close)
            first: bytes | None = None
            if script and (isinstance(script[0], bytes) or script[0] is Act.LISTEN):
                first = read_request(opened)
                if first.startswith(b"GET /health "):
                    self.connections -= 1
                    self._say_health(opened, first)
                    first = read_request(opened)
                    script = self._take_script()
            for step in script:
                if step is Act.STALL:
                    self._ended.wait()
                elif step is Act.RESET:
                    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
                elif step is Act.CLOSE:
                    return
                elif callable(step):
                    step(opened)
                else:
                    self.requests.append(first or read_request(opened))
                    first = None
                    if isinstance(step, bytes):
                        opened.sendall(step)

    def _say_health(self, opened: socket.socket, request: bytes) -> None:
        self.health_requests.append(request)
        body = json.dumps({"status": "alive", "service_id": self.service_id}).encode()
        opened.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))


def read_request(opened: socket.socket) -> bytes:
    """Return the next request on a connection; raises `ConnectionError` when there is none."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _some(opened)
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [
        int(line.partition(b":")[2])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length:")
    ]
    while len(body) < sum(lengths):
        body += _some(opened)
    return head + b"\r\n\r\n" + body


def _some(opened: socket.socket) -> bytes:
    data = opened.recv(1 << 20)
    if not data:
        raise ConnectionError("the client has gone")
    return data
