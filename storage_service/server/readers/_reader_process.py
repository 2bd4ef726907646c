"""The process of a reader: `python -m` with the descriptors of channel, board and lock.

The process ends at once when the owner is gone: by a signal of the kernel (`child_process.py`), and
by the end of the channel. The descriptor of the directory's lock stays open until then. So the
directory has no other owner while a reader of the former owner could still answer.

The process ignores signals of terminals and process managers: the owner ends the process.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from typing import Any, Final

import uvloop

from streamhouse.core.log_lines import configure_logging
from streamhouse.core.threads import Pool, yield_to_event_loop
from streamhouse.storage_service.server.http._http_server import HttpServer, http_config
from streamhouse.storage_service.server.http.http_exchange import HttpExchange
from streamhouse.storage_service.server.http.open_connections import OpenConnections
from streamhouse.storage_service.server.readers._board import Board, BoardTenure
from streamhouse.storage_service.server.readers._held_table import HeldTables
from streamhouse.storage_service.server.readers._messages import (
    Changed,
    Channel,
    Figures,
    Floor,
    Hold,
    LetGo,
    Moved,
    Opening,
    State,
    Stop,
)
from streamhouse.storage_service.server.readers._reader_app import ReaderApp, ReaderService
from streamhouse.storage_service.server.readers._reader_connection import reader_connection
from streamhouse.storage_service.server.status.metrics import ServiceMetrics

__all__ = ["main"]

_logger = logging.getLogger(__name__)

_FIGURES_S: Final = 1.0


class _Reader:
    """A running reader. Event loop only."""

    def __init__(self, opening: Opening, board: Board, channel: Channel) -> None:
        config = opening.config
        self._channel = channel
        self._metrics = ServiceMetrics()
        self._workers = Pool("reader-rows", config.worker_threads)
        self._connections = OpenConnections.of(config)
        self._tables = HeldTables(config, board, channel.send)
        self._service = ReaderService(
            config,
            self._workers,
            self._metrics,
            self._tables,
            may_lose_rows=opening.may_lose_rows,
            tenure=BoardTenure(board) if opening.is_journalled else None,
            connections=self._connections,
            last_grants=opening.last_grants,
        )
        protocol = reader_connection(
            self._send_socket, large_requests_bytes_max=config.bodies_bytes_max
        )
        settings = http_config(
            config,
            ReaderApp(self._service, is_traced=opening.is_traced),
            self._connections,
            protocol=protocol,
        )
        self.server = HttpServer(settings, self._connections, None)
        self._adopting: set[asyncio.Task[None]] = set()
        self._has_counted = False
        self._service.on_answered = self._answered

    def take(self, message: Any, connection: socket.socket | None) -> None:
        """Take a message of the owner."""
        match message:
            case Moved(data, moves):
                assert connection is not None
                adopting = self.server.adopt(connection, data, moves=moves, stays_s=0)
                task = asyncio.ensure_future(adopting)
                self._adopting.add(task)
                task.add_done_callback(self._adopting.discard)
            case Hold():
                self._tables.hold(message)
            case LetGo(path, generation):
                self._tables.end_generation(path, generation)
            case Floor():
                self._tables.floor(message)
            case State():
                self._tables.state(message)
            case Changed(generation):
                self._tables.changed(generation)
            case Stop():
                self._service.is_draining = True
                self._tables.wake_all()
                self.server.should_exit = True

    async def report(self) -> None:
        """Send the figures again and again."""
        while True:
            await asyncio.sleep(_FIGURES_S)
            self._tables.look()
            self.send_figures()

    def send_figures(self) -> None:
        """Send the state, and the counters if they may have changed."""
        has_counted = self._has_counted or bool(self._service.subscriptions)
        self._has_counted = False
        self._channel.send(
            Figures(
                len(self._connections),
                len(self._service.subscriptions),
                self._tables.memory_bytes,
                self._metrics.counts() if has_counted else None,
                self._tables.take_read_rows(),
            )
        )

    def _answered(self, _: HttpExchange) -> None:
        self._has_counted = True

    def _send_socket(self, descriptor: int, data: bytes, moves: int) -> None:
        self._channel.send(Moved(data, moves), descriptor)


async def _run(channel_descriptor: int, board: Board) -> None:
    opened: asyncio.Future[Opening] = asyncio.get_running_loop().create_future()
    reader: _Reader | None = None
    early: list[tuple[Any, socket.socket | None]] = []

    def on_message(message: Any, connection: socket.socket | None) -> None:
        if isinstance(message, Opening):
            opened.set_result(message)
        elif reader is None:
            early.append((message, connection))
        else:
            reader.take(message, connection)

    end = socket.socket(fileno=channel_descriptor)
    channel = Channel(end, on_message=on_message, on_end=_end_with_owner)
    opening = await opened
    configure_logging(
        logging.getLevelName(opening.log_level), "json" if opening.is_log_json else "text"
    )
    made = _Reader(opening, board, channel)
    reporting = asyncio.ensure_future(made.report())
    serving = asyncio.ensure_future(made.server.serve(sockets=[]))
    await made.server.is_listening.wait()
    # Objects that live as long as the process need no visit by every collection.
    gc.collect()
    gc.freeze()
    reader = made
    for message, connection in early:
        made.take(message, connection)
    await serving
    reporting.cancel()
    made.send_figures()


def _end_with_owner() -> None:
    """End at once: whoever owns the data next must not find this process answering."""
    os._exit(0)


def main() -> None:
    """Read beside the owner, until the owner says stop or is gone."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    channel, board = int(sys.argv[1]), Board(int(sys.argv[2]))
    yield_to_event_loop()
    uvloop.run(_run(channel, board))
    os._exit(0)


if __name__ == "__main__":
    main()
