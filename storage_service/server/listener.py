"""Run the service: lock and recover the data, listen, announce, serve, drain, close.

The socket is bound before the recovery, so a port in use is reported early. The endpoint is
announced after the recovery, so a caller that reads the ready line is served at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import uvloop
from prometheus_client.core import Metric

from streamhouse.core.errors import UnavailableError
from streamhouse.core.model.lake.facts import LakeCatalog, LakeState
from streamhouse.core.model.lake.older_rows import LakeBucket
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.core.threads import Pool, timer, yield_to_event_loop
from streamhouse.core.traces.exporter_settings import opened_spans
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.engine.keys.key_recovery import KeyRecovery, LakeRows
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.table_moves import TableMoves
from streamhouse.storage_service.ownership.journal.store.object_store import ObjectStoreError
from streamhouse.storage_service.ownership.roles.ending import NOT_STORED_EXIT_CODE, end_at_once
from streamhouse.storage_service.ownership.roles.role import Role, Standing
from streamhouse.storage_service.ownership.roles.shard_start import ShardStart
from streamhouse.storage_service.ownership.roles.standby import TakenOver
from streamhouse.storage_service.ownership.roles.taking import ShardTaker
from streamhouse.storage_service.ownership.shards.chain import DirectoryObjects, Each
from streamhouse.storage_service.ownership.shards.directory import ShardDirectory
from streamhouse.storage_service.ownership.shards.owners import LeaseOwners
from streamhouse.storage_service.server._app import ServiceApp
from streamhouse.storage_service.server._front_app import FrontApp
from streamhouse.storage_service.server._gauges import read_state
from streamhouse.storage_service.server.doors import Door, Doors
from streamhouse.storage_service.server.history.lake_reads import LakeReads
from streamhouse.storage_service.server.http._http_server import HttpServer, http_config
from streamhouse.storage_service.server.http._sockets import (
    bound_socket,
    endpoint_of,
    listen_on,
    shared_sockets,
)
from streamhouse.storage_service.server.http.http_exchange import App, Tenure
from streamhouse.storage_service.server.http.open_connections import OpenConnections
from streamhouse.storage_service.server.http.tls import Certificate
from streamhouse.storage_service.server.readers._readers import Readers
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.server.shards._moves import MoveDesk
from streamhouse.storage_service.server.shards.other_shards import Shards
from streamhouse.storage_service.server.shards.peers import HttpPeers
from streamhouse.storage_service.server.status.metrics import ServiceMetrics

if TYPE_CHECKING:
    from streamhouse.core.traces.spans import Spans

    # Loading the lake library takes a second, and most services never read the lake.
    from streamhouse.reading.lake_only.lake_history import IcebergHistory

__all__ = ["run_service"]

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_FILES_A_BUCKET: Final = 8
# For opening, creating and dropping logs, lake states and retention: mostly waits for the disk.
_DISK_THREADS: Final = 4
# Records of other shards are read in parallel: each of perhaps a hundred takes a round trip.
_STORE_READS: Final = 16
_OPENING_LEFT_S: Final = 1.0


def run_service(
    config: ServiceConfig,
    *,
    on_ready: Callable[[str], Callable[[], None]],
    on_standby: Callable[[str], None] = lambda _: None,
    doors: Doors,
    on_door: Callable[[str], None] = lambda _: None,
    rebuild: frozenset[TablePath] = frozenset(),
) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests in progress and return.

    Args:
        on_ready: Gets the endpoint once requests are answered. Returns a function to call, on
            another thread, when the service begins to stop and still answers all requests.
        on_standby: Gets the endpoint once a standby follows the owner.
        doors: The further protocols; `doors_of` returns the doors of a configuration.
        on_door: Gets the announcement of each door with a socket, right after `on_ready`.
        rebuild: Primary key tables to rebuild from the log, even if the rows are undamaged.
    Raises `InvalidRequestError` or `UnavailableError` if the service cannot start.
    """
    certificate = Certificate.of(config)
    with contextlib.ExitStack() as stack:
        listening = bound_socket(config.host, config.port, option="--port")
        stack.enter_context(contextlib.closing(listening))
        door_sockets: list[tuple[Door, socket.socket]] = []
        for door in doors:
            if door.port is not None:
                bound = bound_socket(config.host, door.port, option=door.port_option)
                door_sockets.append((door, stack.enter_context(contextlib.closing(bound))))
        config = _within_open_files(config)
        # Threads decode rows.
        yield_to_event_loop()
        with opened_spans("streamhouse") as spans:
            process = functools.partial(
                _Process,
                config,
                listening,
                certificate,
                on_ready=on_ready,
                on_standby=on_standby,
                doors=doors,
                door_sockets=door_sockets,
                on_door=on_door,
                spans=spans,
            )
            recovery = KeyRecovery(lake_rows=_lake_rows(config.lake_catalog()), rebuild=rebuild)
            serving = _serve(process, recovery)
            uvloop.run(serving)


# The lake's library takes a second to load, and most services never need it.


def _lake_rows(catalog: LakeCatalog) -> LakeRows:
    def lake_rows(table: TableInfo, lake: LakeState, bucket: int) -> LakeBucket:
        from streamhouse.reading.lake_only.lake_bucket import lake_bucket_rows  # noqa: PLC0415 - pyiceberg loads with the first read

        return lake_bucket_rows(catalog, table, lake, bucket)

    return lake_rows


def _lake_history(catalog: LakeCatalog) -> IcebergHistory:
    from streamhouse.reading.lake_only.lake_history import IcebergHistory  # noqa: PLC0415 - pyiceberg loads with the first read

    return IcebergHistory(catalog)


async def _serve(make_process: Callable[..., _Process], recovery: KeyRecovery) -> None:
    # For `asyncio.to_thread`, with the bound of asyncio's own pool.
    bound = min(32, (os.cpu_count() or 1) + 4)
    asyncio.get_running_loop().set_default_executor(Pool("default", bound))
    # Signal handlers come first: a caller may send a signal right after the ready line.
    process = make_process(signals=_StopSignals())
    try:
        if process.config.journal_url is None:
            await _serve_alone(process, recovery)
        else:
            await _serve_shard(process, recovery)
    finally:
        process.workers.shutdown()
        process.disk.shutdown()


async def _serve_alone(process: _Process, recovery: KeyRecovery) -> None:
    """Serve a directory without a journal; connections wait until the recovery is done."""
    async with (
        process.open_tables(recovery) as manager,
        process.service_of(manager) as (service, app),
    ):
        await process.listen(app)
        await process.serve_until_stopped(service)


async def _serve_shard(process: _Process, recovery: KeyRecovery) -> None:
    """Answer as `FrontApp` from the start; serve all routes once this process owns the shard."""
    config, runtime = process.config, process.runtime
    if not config.has_own_catalog:
        _logger.warning(
            "event=lake_in_data_directory advice='for trials only: the lake is lost with the"
            " directory; give --catalog-property and --warehouse'"
        )
    standing = Standing(config.shard)
    front = FrontApp(
        config,
        standing=standing,
        metrics=process.metrics,
        executor=process.workers,
        doors=process.doors,
        connections=process.connections,
    )
    try:
        async with contextlib.AsyncExitStack() as closing:
            directory = await runtime.run(DataDirectory.open, config.data_dir)
            closing.callback(directory.close)
            taker = ShardTaker(
                config,
                directory,
                endpoint=process.endpoint,
                standing=standing,
                on_standby=process.on_standby,
            )
            closing.push_async_callback(taker.close)
            process.watch_standing(standing)
            closing.push_async_callback(process.close)
            await process.listen(front)
            with process.ended_by_a_stop():
                takeover = await process.until_stopped(taker.take())
                if takeover is None:
                    await taker.close()
            if takeover is not None:
                reads = closing.enter_context(Pool("directory", _STORE_READS))
                await _serve_owned(
                    process,
                    recovery,
                    directory,
                    *takeover,
                    front=front,
                    standing=standing,
                    each=reads.map,
                )
    except ObjectStoreError as error:
        raise UnavailableError(
            f"the journal {config.journal_url} cannot be used: {error}; start again to go on"
        ) from error


async def _serve_owned(
    process: _Process,
    recovery: KeyRecovery,
    directory: DataDirectory,
    start: ShardStart,
    takeover: TakenOver,
    *,
    front: FrontApp,
    standing: Standing,
    each: Each,
) -> None:
    config, runtime = process.config, process.runtime
    shard, warm = takeover.shard, takeover.warm
    replication = await runtime.run(shard.record, directory, takeover.begun)
    names = ShardDirectory(DirectoryObjects(start.store), shard=config.shard, each=each)
    async with process.open_tables(
        dataclasses.replace(recovery, warm=warm),
        directory=directory,
        replication=replication,
        names=names,
    ) as manager:
        owners = LeaseOwners(start.store, lease_ms=config.lease_ms)
        peers = HttpPeers(is_tls=config.is_reached_by_tls)
        figures = standing.journal.figures
        shards = Shards(names, owners, manager, peers, each=each, figures=figures)
        moves = TableMoves(manager, names, start.store)
        await moves.clear()
        desk = MoveDesk(moves, shards, config)
        async with process.service_of(manager, tenure=shard, shards=shards, moves=desk) as (
            service,
            app,
        ):
            if warm is not None:
                warm.close()
            await runtime.run(shard.begin_checkpoints, directory, manager.copy_keys)
            await runtime.run(start.finish, shard)
            standing.role = Role.OWNER
            front.hand_over(app)
            await process.serve_until_stopped(service)
            # The timer also covers the commits made while the tables close.
            giving_up = _give_up_after(config)
    # No request is in progress any more: another process may own the shard from now on.
    await runtime.run(functools.partial(shard.close, timeout_s=threading.TIMEOUT_MAX))
    giving_up.cancel()


def _give_up_after(config: ServiceConfig) -> threading.Timer:
    """End the process if the journal's store does not take all data in time."""
    timeout_s = config.drain_timeout_ms / 1_000

    def give_up() -> None:
        end_at_once(
            "stop_cut_short",
            f"the journal {config.journal_url} did not take everything within {timeout_s:g} s"
            " (drain_timeout_ms); the next start on this data directory stores the rest",
            exit_code=NOT_STORED_EXIT_CODE,
        )

    return timer("give-up", timeout_s, give_up)


class _Process:
    """The process of a service: threads, sockets and metrics, needed before the tables are open."""

    def __init__(
        self,
        config: ServiceConfig,
        listening: socket.socket,
        certificate: Certificate | None,
        *,
        signals: _StopSignals,
        on_ready: Callable[[str], Callable[[], None]],
        on_standby: Callable[[str], None],
        doors: Doors,
        door_sockets: Sequence[tuple[Door, socket.socket]],
        on_door: Callable[[str], None],
        spans: Spans | None,
    ) -> None:
        self.config = config
        self.doors = doors
        self._door_sockets = door_sockets
        self._on_door = on_door
        self._spans = spans
        self.signals = signals
        self.endpoint = endpoint_of(listening, config)
        self.metrics = ServiceMetrics()
        # Two pools: the creation of a table with thousands of buckets must not delay rows.
        self.workers = Pool("rows", config.worker_threads)
        self.disk = Pool("disk", _DISK_THREADS)
        self.runtime = Runtime(executor=self.disk, observer=self.metrics)
        self._listening = [listening, *shared_sockets()]
        self._certificate = certificate
        self._on_ready = on_ready
        self._on_standby = on_standby
        self._standing: Standing | None = None
        self.connections = OpenConnections.of(config)
        self._server: HttpServer | None = None
        self._serving: asyncio.Future[None] | None = None

    async def listen(self, app: App) -> None:
        """Serve `app` on the sockets; returns once the server listens."""
        config = http_config(self.config, app, self.connections)
        self._server = HttpServer(config, self.connections, self._certificate)
        listen_on(self._listening[0], option="--port")
        self._serving = asyncio.ensure_future(self._server.serve(sockets=self._listening))
        listening = asyncio.ensure_future(self._server.is_listening.wait())
        await asyncio.wait([self._serving, listening], return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if self._serving.done():
            self._serving.result()

    def on_standby(self) -> None:
        """Announce that the process follows the owner of its shard."""
        self._on_standby(self.endpoint)

    def watch_standing(self, standing: Standing) -> None:
        """Report only the role of a process with a journal, until the service has more metrics."""
        self._standing = standing

        async def read() -> list[Metric]:
            return standing.metrics()

        self.metrics.watch(read)

    @contextlib.contextmanager
    def ended_by_a_stop(self) -> Iterator[None]:
        """Within the context a signal to stop ends the process soon, even with busy threads.

        No request is answered yet, and the next start repeats every interrupted step. The journal
        gets no seal: the journal may lack rows that this disk has acknowledged.
        """
        ending = asyncio.ensure_future(self._end_soon())
        try:
            yield
        finally:
            ending.cancel()

    async def _end_soon(self) -> None:
        await self.signals.stop.wait()
        # Most openings finish within this time, and the process then ends in order.
        await asyncio.sleep(_OPENING_LEFT_S)
        end_at_once("stopped_at_start", "the next start repeats what was begun", exit_code=0)

    async def until_stopped(self, awaitable: Coroutine[Any, Any, _T]) -> _T | None:
        """Return the coroutine's result, or None after a signal to stop."""
        task = asyncio.ensure_future(awaitable)
        stopped = asyncio.ensure_future(self.signals.stop.wait())
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait([task])
        return None

    async def close(self) -> None:
        """Stop listening; returns when the connections are closed."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving

    @contextlib.asynccontextmanager
    async def open_tables(
        self, recovery: KeyRecovery, **arguments: Any
    ) -> AsyncIterator[TabletManager]:
        """Open the tables, with these arguments of `TabletManager.open`; the end closes them."""
        with self.ended_by_a_stop():
            manager = await TabletManager.open(
                self.config,
                runtime=self.runtime,
                recovery=recovery,
                sidecars=self.doors.sidecars,
                **arguments,
            )
        try:
            yield manager
        finally:
            await manager.close()

    @contextlib.asynccontextmanager
    async def service_of(
        self,
        manager: TabletManager,
        *,
        tenure: Tenure | None = None,
        shards: Shards | None = None,
        moves: MoveDesk | None = None,
    ) -> AsyncIterator[tuple[Service, ServiceApp]]:
        """Open the service of these tables; all readers of rows have ended with the context."""
        async with contextlib.AsyncExitStack() as closing:
            if shards is not None:
                closing.push_async_callback(asyncio.to_thread, shards.close)
            if moves is not None:
                closing.push_async_callback(moves.close)
            lake_reads = LakeReads(functools.partial(_lake_history, self.config.lake_catalog()))
            closing.callback(lake_reads.close)
            service = Service(
                self.config,
                manager,
                self.workers,
                self.metrics,
                tenure=tenure,
                connections=self.connections,
                shards=shards,
                moves=moves,
                spans=self._spans,
                lake_reads=lake_reads,
            )
            app = ServiceApp(service, self.doors)
            closing.push_async_callback(asyncio.to_thread, app.close)
            closing.push_async_callback(manager.upkeep.stop)
            self.metrics.watch(functools.partial(_read_all, service, self._standing))
            # Objects that live as long as the process need no visit by every collection.
            gc.collect()
            gc.freeze()
            manager.upkeep.start(service.jobs())
            yield service, app

    async def serve_until_stopped(self, service: Service) -> None:
        """Announce that requests are answered; after a signal to stop, end all connections."""
        assert self._server is not None
        async with contextlib.AsyncExitStack() as listening:
            listening.push_async_callback(self.close)
            announcements = []
            for door, bound in self._door_sockets:
                listen_on(bound, option=door.port_option)
                accepting = door.listen(
                    bound, connections=self.connections, certificate=self._certificate
                )
                announcements.append(await listening.enter_async_context(accepting))
            if self.config.readers:
                readers = Readers(service, self._server, count=self.config.readers)
                listening.push_async_callback(readers.close)
                readers.start()
            on_stop = self._on_ready(self.endpoint)
            for announcement in announcements:
                self._on_door(announcement)
            await _until_stopped(self.signals, service, self._server, on_stop)


async def _read_all(service: Service, standing: Standing | None) -> list[Metric]:
    state = await read_state(service)
    return state if standing is None else [*state, *standing.metrics()]


class _StopSignals:
    """The first SIGTERM or SIGINT sets `stop`, the second signal sets `hurry`."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._received)

    def _received(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


async def _until_stopped(
    signals: _StopSignals, service: Service, server: HttpServer, on_stop: Callable[[], None]
) -> None:
    """Wait for a signal, then stop in order; a second signal ends all waits."""
    await signals.stop.wait()
    _logger.info("event=stopping open_requests=%d", service.open_requests)
    stopping = asyncio.ensure_future(_stop_in_order(service, on_stop))
    hurried = asyncio.ensure_future(signals.hurry.wait())
    await asyncio.wait([stopping, hurried], return_when=asyncio.FIRST_COMPLETED)
    if not (stopping.done() and stopping.result()):
        _logger.warning("event=stop_cut_short open_requests=%d", service.open_requests)
        server.force_exit = signals.hurry.is_set()
        service.is_draining = True  # also if the time was over before `drain`
    for task in (stopping, hurried):
        task.cancel()
    server.should_exit = True


async def _stop_in_order(service: Service, on_stop: Callable[[], None]) -> bool:
    try:
        async with asyncio.timeout(service.config.drain_timeout_ms / 1000):
            await asyncio.to_thread(on_stop)
            await service.drain()
    except TimeoutError:
        return False
    return True


def _within_open_files(config: ServiceConfig) -> ServiceConfig:
    """Raise the limit of open files to the system's limit; use at most half for connections.

    The limit of requests is below the limit of connections, so that a caller gets an error message
    at the limit of requests.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files_needed = config.connections_max + config.buckets_max * _FILES_A_BUCKET
    if hard < files_needed:
        _logger.debug("event=few_open_files limit=%d full_service_needs=%d", hard, files_needed)
    connections_max = min(config.connections_max, max(1, hard // 2))
    if connections_max < config.connections_max:
        _logger.info(
            "event=fewer_connections connections_max=%d open_files_limit=%d advice='ulimit -n'",
            connections_max,
            hard,
        )
    requests_max = min(config.open_requests_max, max(1, connections_max * 9 // 10))
    return dataclasses.replace(
        config, connections_max=connections_max, open_requests_max=requests_max
    )
