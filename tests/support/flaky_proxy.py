"""A loopback TCP proxy that loses answers (the request arrives, the reply never does), keeps them
back, is slow, or lets nobody through.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

__all__ = ["FlakyProxy"]


class FlakyProxy:
    """Forwards connections to `port`; while `answers_to_lose` is positive, cuts before an answer.

    While `answers_to_hold` is positive the connection stays open instead, and nothing comes. As
    many pieces of answers as `pieces_to_pass` come through before. Either happens when the first
    byte of the answer arrives, so the service has done the work. Each piece of an answer waits
    `answer_delay_s`; while `is_down`, new connections are closed at once.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._ended = threading.Event()
        self.answers_to_lose = 0
        self.answers_to_hold = 0
        self.pieces_to_pass = 0
        self.answers_lost = 0
        self.answer_delay_s = 0.0
        self.is_down = False

    def __enter__(self) -> FlakyProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.cut_all()

    @property
    def endpoint(self) -> str:
        """The URL to give to a client."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def cut_all(self) -> None:
        """Break every open connection."""
        self._ended.set()
        self._ended = threading.Event()
        with self._lock:
            for opened in self._sockets:
                with contextlib.suppress(OSError):
                    opened.shutdown(socket.SHUT_RDWR)
            self._sockets.clear()

    def _accept(self) -> None:
        while True:
            try:
                downstream, _ = self._listener.accept()
            except OSError:
                return
            if self.is_down:
                downstream.close()
                continue
            upstream = socket.create_connection(("127.0.0.1", self._port))
            with self._lock:
                self._sockets += [downstream, upstream]
            for source, sink, is_answer in (
                (downstream, upstream, False),
                (upstream, downstream, True),
            ):
                threading.Thread(
                    target=self._pump, args=(source, sink, is_answer), daemon=True
                ).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_answer and (ended := self._keeps_this_one()):
                    ended.wait()
                    break
                if is_answer and self.answer_delay_s:
                    time.sleep(self.answer_delay_s)  # sleep: being slow is what is asked of it
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _keeps_this_one(self) -> threading.Event | None:
        """Return what to wait for before the connection is cut; None if the answer goes on."""
        with self._lock:
            if self.answers_to_lose <= 0 and self.answers_to_hold <= 0:
                return None
            if self.pieces_to_pass > 0:
                self.pieces_to_pass -= 1
                return None
            self.answers_lost += 1
            if self.answers_to_hold > 0:
                self.answers_to_hold -= 1
                return self._ended
            self.answers_to_lose -= 1
            cut = threading.Event()
            cut.set()
            return cut
