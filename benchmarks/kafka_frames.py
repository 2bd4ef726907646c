"""Produce and Fetch requests as bytes made beforehand: a client that costs next to nothing.

The versions are the last ones before Kafka's compact encoding: the same work for the service.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Final

__all__ = ["FrameSocket", "fetch_frame", "fetched", "produce_frame", "produced_error"]

_PRODUCE: Final = (0, 7)
_FETCH: Final = (1, 11)
_ACKS_ALL: Final = -1
_TIMEOUT_MS: Final = 30_000


class FrameSocket:
    """One connection to a Kafka door."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = self._socket.makefile("rb")

    def send(self, frame: bytes) -> None:
        """Send a request."""
        self._socket.sendall(frame)

    def answer(self) -> bytes:
        """Return the next answer, without its length and its number."""
        (length,) = struct.unpack(">i", self._stream.read(4))
        return self._stream.read(length)[4:]

    def pipelined(self, frames: Sequence[bytes], *, in_flight: int) -> list[bytes]:
        """Send requests, so many of which wait for their answers at a time; return the answers."""
        answers = []
        for number, frame in enumerate(frames):
            if number >= in_flight:
                answers.append(self.answer())
            self.send(frame)
        while len(answers) < len(frames):
            answers.append(self.answer())
        return answers

    def __enter__(self) -> FrameSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._socket.close()


def _framed(api: tuple[int, int], body: bytes) -> bytes:
    request = struct.pack(">hhih", *api, 1, -1) + body
    return struct.pack(">i", len(request)) + request


def _name(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


def produce_frame(topic: str, partition: int, records: bytes) -> bytes:
    """Return a request that stores a record batch durably."""
    body = struct.pack(">hhii", -1, _ACKS_ALL, _TIMEOUT_MS, 1) + _name(topic)
    return _framed(_PRODUCE, body + struct.pack(">iii", 1, partition, len(records)) + records)


def produced_error(answer: bytes) -> int:
    """Return the error code of the one partition of an answer to Produce."""
    (name_bytes,) = struct.unpack_from(">h", answer, 4)
    return int(struct.unpack_from(">h", answer, 4 + 2 + name_bytes + 4 + 4)[0])


def fetch_frame(topic: str, partition: int, offset: int, *, bytes_max: int) -> bytes:
    """Return a request for the records of one partition from an offset on."""
    body = struct.pack(">iiiibii", -1, 0, 1, bytes_max, 0, 0, -1)
    body += struct.pack(">i", 1) + _name(topic) + struct.pack(">i", 1)
    body += struct.pack(">iiqqi", partition, -1, offset, -1, bytes_max)
    return _framed(_FETCH, body + struct.pack(">i", 0) + _name(""))


def fetched(answer: bytes) -> tuple[int, bytes]:
    """Return the error code and the records of the one partition of an answer to Fetch."""
    (name_bytes,) = struct.unpack_from(">h", answer, 14)
    at = 14 + 2 + name_bytes + 4 + 4
    error, _, _, _, aborted = struct.unpack_from(">hqqqi", answer, at)
    at += 30 + 16 * max(aborted, 0) + 4
    (size,) = struct.unpack_from(">i", answer, at)
    return int(error), answer[at + 4 : at + 4 + max(size, 0)]
