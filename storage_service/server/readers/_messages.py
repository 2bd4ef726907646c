"""What the owner and a reader tell each other, and the channel for it: a pair of Unix sockets.

A message may carry a client's connection. Messages arrive in order, whole, and each once; the end
of either process ends the channel.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import pickle
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.server.access.access import LastGrants
from streamhouse.storage_service.server.readers._board import Published
from streamhouse.storage_service.server.status.metrics import Counts

__all__ = [
    "Changed",
    "Channel",
    "Figures",
    "Floor",
    "Hold",
    "Holds",
    "LetGo",
    "Lost",
    "Moved",
    "Opened",
    "Opening",
    "State",
    "Stop",
    "Watch",
]

_logger = logging.getLogger(__name__)

_HEAD: Final = struct.Struct("<IB")
_RECEIVED_BYTES: Final = 256 << 10
_DESCRIPTORS_MAX: Final = 16
# The kernel has no memory, or too many descriptors of this user are on their way: both pass.
_PASSING: Final = frozenset((errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS))
_SEND_AGAIN_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Opening:
    """Owner: the configuration, the first message."""

    config: ServiceConfig
    log_level: int
    is_log_json: bool
    is_journalled: bool
    may_lose_rows: bool
    is_traced: bool
    last_grants: LastGrants | None
    """The owner's, which may be better than the file is by now."""


@dataclass(frozen=True, slots=True)
class State:
    """Owner: the lake state of a table, and the offsets of overwritten rows.

    The owner sends the message before writing the `number` to the board.
    """

    generation: int
    number: int
    lake: LakeState
    truncated_offsets: Mapping[int, int]
    truncated_at_us: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Owner: hold the log of a table, and with `by_key` the rows of a primary key table.

    `slot` and `generation` are the table's place on the board.
    """

    info: TableInfo
    slot: int
    generation: int
    by_key: bool
    state: State


@dataclass(frozen=True, slots=True)
class LetGo:
    """Owner: the generation has ended, and its rows take memory for nothing."""

    path: TablePath
    generation: int


@dataclass(frozen=True, slots=True)
class Opened:
    """Reader: the files of the table's rows are open."""

    generation: int


@dataclass(frozen=True, slots=True)
class Floor:
    """Owner: what was applied to each bucket when `Opened` arrived; empty for a generation past."""

    generation: int
    offsets: Sequence[int]


@dataclass(frozen=True, slots=True)
class Holds:
    """Reader: reads of the table's log can be answered, or lookups with `by_key`."""

    generation: int
    by_key: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """Reader: the log, or with `by_key` the rows, are not or no longer held."""

    generation: int
    by_key: bool
    why: str


@dataclass(frozen=True, slots=True)
class Watch:
    """Reader: asks for one `Changed` once the published offsets differ from `published`."""

    generation: int
    published: Published


@dataclass(frozen=True, slots=True)
class Changed:
    """Owner: the published offsets differ from the offsets of a `Watch`."""

    generation: int


@dataclass(frozen=True, slots=True)
class Moved:
    """Either: a connection, with the received bytes that nobody has answered.

    `moves` counts how often a reader gave the connection back.
    """

    data: bytes
    moves: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Reader: the state and all counters of the process.

    `samples` is (metric's family, sample's name, labels) -> value; None: as in the last message. To
    read all counters takes a reader without requests most of its processor time. `read_rows` has
    the rows sent since the figures before, by generation.
    """

    connections: int
    subscriptions: int
    key_bytes: int
    samples: Counts | None
    read_rows: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stop:
    """Owner: answer the requests in progress, close the connections, and end."""


class Channel:
    """One end of the channel. Event loop only."""

    def __init__(
        self,
        end: socket.socket,
        *,
        on_message: Callable[[Any, socket.socket | None], None],
        on_end: Callable[[], None],
    ) -> None:
        end.setblocking(False)
        self._socket = end
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        # None: this process had no room for the descriptor.
        self._descriptors: deque[int | None] = deque()
        self._unsent: deque[tuple[memoryview, int | None]] = deque()
        self._is_open = True
        self._loop.add_reader(end.fileno(), self._receive)

    def send(self, message: Any, descriptor: int | None = None) -> None:
        """Send a message; the channel closes `descriptor`, a connection's, once sent.

        A message to a process that has ended is dropped.
        """
        if not self._is_open:
            if descriptor is not None:
                os.close(descriptor)
            return
        body = pickle.dumps(message)
        data = memoryview(_HEAD.pack(len(body), descriptor is not None) + body)
        is_idle = not self._unsent
        self._unsent.append((data, descriptor))
        if is_idle:
            self._send()

    def close(self) -> None:
        """Close the channel and what is on the way; idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        unsent = [descriptor for _, descriptor in self._unsent if descriptor is not None]
        self._unsent.clear()
        for descriptor in (*unsent, *self._descriptors):
            if descriptor is not None:
                os.close(descriptor)
        self._descriptors.clear()

    def _send(self) -> None:
        while self._is_open and self._unsent:
            data, descriptor = self._unsent.popleft()
            descriptors = [] if descriptor is None else [descriptor]
            try:
                sent = socket.send_fds(self._socket, [data], descriptors)
            except BlockingIOError:
                self._unsent.appendleft((data, descriptor))
                self._loop.add_writer(self._socket.fileno(), self._send)
                return
            except OSError as error:
                self._unsent.appendleft((data, descriptor))
                if error.errno in _PASSING:
                    self._loop.call_later(_SEND_AGAIN_S, self._send)
                # Else the end of the other process, which is noticed by the reading side.
                return
            if descriptor is not None:
                os.close(descriptor)
            if sent < len(data):
                self._unsent.appendleft((data[sent:], None))
        if self._is_open:
            self._loop.remove_writer(self._socket.fileno())

    def _receive(self) -> None:
        try:
            data, descriptors, flags, _ = socket.recv_fds(
                self._socket, _RECEIVED_BYTES, _DESCRIPTORS_MAX
            )
        except BlockingIOError:
            return
        except OSError:
            data, descriptors, flags = b"", [], 0
        self._descriptors.extend(descriptors)
        if flags & socket.MSG_CTRUNC:
            # Too many open files: the kernel has closed the connection. Without its place here the
            # next client's connection would go with this client's request.
            self._descriptors.append(None)
        if not data:
            self.close()
            self._on_end()
            return
        self._received += data
        while self._is_open and len(self._received) >= _HEAD.size:
            size, has_descriptor = _HEAD.unpack_from(self._received)
            if len(self._received) < _HEAD.size + size:
                return
            body = bytes(self._received[_HEAD.size : _HEAD.size + size])
            del self._received[: _HEAD.size + size]
            carried = None
            if has_descriptor:
                descriptor = self._descriptors.popleft()
                if descriptor is None:
                    _logger.warning("event=connection_lost why='too many open files'")
                    continue
                carried = socket.socket(fileno=descriptor)
            self._on_message(pickle.loads(body), carried)
