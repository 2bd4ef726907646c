"""Run the service: lock and recover the data, listen, announce, serve, drain, close.

The socket is bound before recovery, so a taken port is found early, and announced after it, so a
caller that saw the ready line is served at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import logging
import resource
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import uvicorn
import uvloop
from prometheus_client.core import Metric

from streamhouse.core.errors import UnavailableError
from streamhouse.core.extras import require
from streamhouse.core.model.lake.older_rows import LakeHistory
from streamhouse.core.traces.settings import opened_spans
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.engine.keys.key_recovery import KeyRecovery
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
from streamhouse.storage_service.server._front_app import App, FrontApp
from streamhouse.storage_service.server._gauges import read_state
from streamhouse.storage_service.server._moves import MoveDesk
from streamhouse.storage_service.server._sockets import bound_socket, endpoint_of, shared_sockets
from streamhouse.storage_service.server.history.lake_reads import LakeReads
from streamhouse.storage_service.server.http._http_protocol import bounded_protocol
from streamhouse.storage_service.server.http.http_exchange import Tenure
from streamhouse.storage_service.server.http.open_connections import OpenConnections
from streamhouse.storage_service.server.http.tls import Certificate, TlsListener
from streamhouse.storage_service.server.peers import HttpPeers
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.server.shards import Shards
from streamhouse.storage_service.server.status._metrics import ServiceMetrics

if TYPE_CHECKING:
    from streamhouse.core.traces.spans import Spans

__all__ = ["http_config", "run_service"]

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_SWITCH_INTERVAL_S: Final = 0.0005
_FILES_A_BUCKET: Final = 8
_BACKLOG: Final = 2_048
# For opening, making and dropping logs, lake states and retention: they mostly wait for the disk.
_DISK_THREADS: Final = 4
# What other shards have in the store is read side by side: of a hundred, each takes a round trip.
_STORE_READS: Final = 16
# What a stopping server waits for connections after their requests are done.
_CLOSE_TIMEOUT_S: Final = 2
_OPENING_LEFT_S: Final = 1.0


def run_service(
    config: ServiceConfig,
    *,
    on_ready: Callable[[str], Callable[[], None]],
    on_standby: Callable[[str], None] = lambda _: None,
    on_kafka: Callable[[str], None] = lambda _: None,
    recovery: KeyRecovery | None = None,
    open_history: Callable[[], LakeHistory] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then finish what was begun and return.

    `on_ready` gets the endpoint once requests are answered. What it returns is called, on another
    thread, when the service begins to stop and still answers everything. `on_standby` gets the
    endpoint once a standby follows, `on_kafka` the address for Kafka clients right after the
    endpoint, if they are served. `recovery` says how lost rows by key are got back; without it from
    the changelog alone. `open_history` gives what reads rows that have left the log, for Kafka
    clients and for who asks for a time; without it the log is all there is.
    Raises `InvalidRequestError` or `UnavailableError` if the service cannot start.
    """
    certificate = Certificate.of(config)
    _require_kafka(config)
    with contextlib.ExitStack() as stack:
        listening = bound_socket(config.host, config.port, option="--port")
        stack.enter_context(contextlib.closing(listening))
        kafka: _KafkaSocket | None = None
        if config.kafka_port is not None:
            bound = bound_socket(config.host, config.kafka_port, option="--kafka-port")
            stack.enter_context(contextlib.closing(bound))
            kafka = _KafkaSocket(bound, on_kafka)
        config = _within_open_files(config)
        # A thread that decodes rows must give way to the event loop at once, not after 5 ms.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        with opened_spans("streamhouse") as spans:
            process = functools.partial(
                _Process,
                config,
                listening,
                certificate,
                on_ready=on_ready,
                on_standby=on_standby,
                kafka=kafka,
                spans=spans,
                open_history=open_history,
            )
            serving = _serve(process, recovery)
            uvloop.run(serving)


def _require_kafka(config: ServiceConfig) -> None:
    if config.kafka_port is not None:
        require("kafka", "--kafka-port")


async def _serve(make_process: Callable[..., _Process], recovery: KeyRecovery | None) -> None:
    # First of all: a caller may send a signal as soon as it has seen the ready line.
    process = make_process(signals=_StopSignals())
    try:
        if process.config.journal_url is None:
            await _serve_alone(process, recovery)
        else:
            await _serve_shard(process, recovery or KeyRecovery())
    finally:
        process.workers.shutdown()
        process.disk.shutdown()


async def _serve_alone(process: _Process, recovery: KeyRecovery | None) -> None:
    """Serve a directory that is nobody else's; connections wait until it is recovered."""
    with process.ended_by_a_stop():
        manager = await TabletManager.open(
            process.config, runtime=process.runtime, recovery=recovery
        )
    async with process.service_of(manager) as (service, app):
        await process.listen(app)
        await process.serve_until_stopped(service)


async def _serve_shard(process: _Process, recovery: KeyRecovery) -> None:
    """Answer from the start what a process answers that owns nothing; serve once it owns."""
    config, runtime = process.config, process.runtime
    if not config.has_own_catalog:
        _logger.warning(
            "event=lake_in_data_directory advice='for trials only: the lake is lost with the"
            " directory; give --catalog-property and --warehouse'"
        )
    standing = Standing(config.shard)
    front = FrontApp(config, standing=standing, metrics=process.metrics, run_blocking=runtime.run)
    directory = await runtime.run(DataDirectory.open, config.data_dir)
    taker = ShardTaker(
        config,
        directory,
        endpoint=process.endpoint,
        standing=standing,
        on_standby=process.on_standby,
    )
    process.watch_standing(standing)
    try:
        await process.listen(front)
        with process.ended_by_a_stop():
            taken = await process.until_stopped(taker.take())
            if taken is None:
                await taker.close()
        if taken is not None:
            with ThreadPoolExecutor(_STORE_READS, thread_name_prefix="directory") as reads:
                await _serve_taken(
                    process,
                    recovery,
                    directory,
                    *taken,
                    front=front,
                    standing=standing,
                    each=reads.map,
                )
    except ObjectStoreError as error:
        raise UnavailableError(
            f"the journal {config.journal_url} cannot be used: {error}; start again to go on"
        ) from error
    finally:
        await process.close()
        await taker.close()
        directory.close()


async def _serve_taken(
    process: _Process,
    recovery: KeyRecovery,
    directory: DataDirectory,
    start: ShardStart,
    taken: TakenOver,
    *,
    front: FrontApp,
    standing: Standing,
    each: Each,
) -> None:
    config, runtime = process.config, process.runtime
    shard, warm = taken.shard, taken.warm
    replication = await runtime.run(shard.record, directory, taken.begun)
    names = ShardDirectory(DirectoryObjects(start.store), shard=config.shard, each=each)
    with process.ended_by_a_stop():
        manager = await TabletManager.open(
            config,
            runtime=runtime,
            recovery=dataclasses.replace(recovery, warm=warm),
            directory=directory,
            replication=replication,
            names=names,
        )
    owners = LeaseOwners(start.store, lease_ms=config.lease_ms)
    peers = HttpPeers(is_tls=config.is_reached_by_tls)
    shards = Shards(names, owners, manager, peers, each=each, figures=standing.journal.figures)
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
        # Also what is committed while the tables close waits for the store.
        giving_up = _give_up_after(config)
    # Nobody is answered any more: now another process may go on at once.
    await runtime.run(functools.partial(shard.close, timeout_s=threading.TIMEOUT_MAX))
    giving_up.cancel()


def _give_up_after(config: ServiceConfig) -> threading.Timer:
    """End the process if its store does not take everything in time."""
    timeout_s = config.drain_timeout_ms / 1_000

    def give_up() -> None:
        end_at_once(
            "stop_cut_short",
            f"the journal {config.journal_url} did not take everything within {timeout_s:g} s"
            " (drain_timeout_ms); the next start on this data directory stores the rest",
            exit_code=NOT_STORED_EXIT_CODE,
        )

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    return timer


class _KafkaSocket(NamedTuple):
    """Where Kafka clients will be served, and who is told once they are."""

    listening: socket.socket
    on_kafka: Callable[[str], None]


class _Process:
    """What there is of a service before its tables are open."""

    def __init__(
        self,
        config: ServiceConfig,
        listening: socket.socket,
        certificate: Certificate | None,
        *,
        signals: _StopSignals,
        on_ready: Callable[[str], Callable[[], None]],
        on_standby: Callable[[str], None],
        kafka: _KafkaSocket | None,
        spans: Spans | None,
        open_history: Callable[[], LakeHistory] | None,
    ) -> None:
        self.config = config
        self._kafka = kafka
        self._open_history = open_history
        self._spans = spans
        self.signals = signals
        self.endpoint = endpoint_of(listening, config)
        self.metrics = ServiceMetrics()
        # Two pools: making a table with thousands of buckets must not keep rows waiting.
        self.workers = ThreadPoolExecutor(config.worker_threads, thread_name_prefix="rows")
        self.disk = ThreadPoolExecutor(_DISK_THREADS, thread_name_prefix="disk")
        self.runtime = Runtime(executor=self.disk, observer=self.metrics)
        self._listening = [listening, *shared_sockets()]
        self._certificate = certificate
        self._on_ready = on_ready
        self._on_standby = on_standby
        self._standing: Standing | None = None
        self._connections = OpenConnections.of(config)
        self._server: _Server | None = None
        self._serving: asyncio.Future[None] | None = None

    async def listen(self, app: App) -> None:
        """Let `app` answer what comes in; returns once it does."""
        config = http_config(self.config, app, self._connections)
        self._server = _Server(config, self._connections, self._certificate)
        self._serving = asyncio.ensure_future(self._server.serve(sockets=self._listening))
        await self._server.is_listening.wait()

    def on_standby(self) -> None:
        """Say that the process follows the owner of its shard."""
        self._on_standby(self.endpoint)

    def watch_standing(self, standing: Standing) -> None:
        """Report the role of a process with a journal, and until it serves nothing else."""
        self._standing = standing

        async def read() -> list[Metric]:
            return standing.metrics()

        self.metrics.watch(read)

    @contextlib.contextmanager
    def ended_by_a_stop(self) -> Iterator[None]:
        """Within this a signal to stop ends the process soon, whatever its threads are doing.

        Nothing is answered yet, and every step of an opening or a restore may be cut short: the
        next start repeats it. The journal gets no seal: it may lack what this disk acknowledged.
        """
        ending = asyncio.ensure_future(self._end_soon())
        try:
            yield
        finally:
            ending.cancel()

    async def _end_soon(self) -> None:
        await self.signals.stop.wait()
        # Most openings are done by then, and end in order.
        await asyncio.sleep(_OPENING_LEFT_S)
        end_at_once("stopped_at_start", "the next start repeats what was begun", exit_code=0)

    async def until_stopped(self, awaitable: Coroutine[Any, Any, _T]) -> _T | None:
        """Return what it returns, or None after a signal to stop."""
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
        """Listen no more; returns when the connections are closed."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving

    @contextlib.asynccontextmanager
    async def service_of(
        self,
        manager: TabletManager,
        *,
        tenure: Tenure | None = None,
        shards: Shards | None = None,
        moves: MoveDesk | None = None,
    ) -> AsyncIterator[tuple[Service, ServiceApp]]:
        """Give the service of these tables; leaving closes both."""
        lake_reads = None if self._open_history is None else LakeReads(self._open_history)
        service = Service(
            self.config,
            manager,
            self.workers,
            self.metrics,
            tenure=tenure,
            connections=self._connections,
            shards=shards,
            moves=moves,
            spans=self._spans,
            lake_reads=lake_reads,
        )
        app = ServiceApp(service)
        try:
            self.metrics.watch(functools.partial(_read_all, service, self._standing))
            # What lives as long as the process need not be walked by every collection.
            gc.collect()
            gc.freeze()
            manager.upkeep.start(service.jobs())
            yield service, app
        finally:
            # Whoever reads rows must have let go of them before they are closed.
            await manager.upkeep.stop()
            if lake_reads is not None:
                lake_reads.close()
            await asyncio.to_thread(app.close)
            if moves is not None:
                await moves.close()
            if shards is not None:
                await asyncio.to_thread(shards.close)
            await manager.close()

    async def serve_until_stopped(self, service: Service) -> None:
        """Say that requests are answered, and return when a signal has ended that."""
        assert self._server is not None
        async with self._kafka_door(service) as address:
            on_stop = self._on_ready(self.endpoint)
            if self._kafka is not None:
                self._kafka.on_kafka(address)
            await _until_stopped(self.signals, service, self._server, on_stop)
        await self.close()

    @contextlib.asynccontextmanager
    async def _kafka_door(self, service: Service) -> AsyncIterator[str]:
        """Serve Kafka clients meanwhile, if that is asked; gives the address they are told."""
        if self._kafka is None:
            yield ""
            return
        require("kafka", "--kafka-port")
        from streamhouse.storage_service.kafka_door.door import KafkaDoor

        door = KafkaDoor(
            service,
            self._kafka.listening,
            connections=self._connections,
            certificate=self._certificate,
        )
        await door.open()
        try:
            yield str(door.address)
        finally:
            await door.close()


async def _read_all(service: Service, standing: Standing | None) -> list[Metric]:
    state = await read_state(service)
    return state if standing is None else [*state, *standing.metrics()]


class _StopSignals:
    """The first SIGTERM or SIGINT asks to stop, the second one to hurry."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._received)

    def _received(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


async def _until_stopped(
    signals: _StopSignals, service: Service, server: _Server, on_stop: Callable[[], None]
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


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals and TLS to us and says when it listens."""

    def __init__(
        self, config: uvicorn.Config, connections: OpenConnections, certificate: Certificate | None
    ) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()
        self._connections = connections
        self._certificate = certificate
        self._tls: list[TlsListener] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: draining comes before uvicorn's own end."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening and say so."""
        if self._certificate is None:
            await super().startup(sockets=sockets)
        else:
            await super().startup(sockets=[])
            self._tls = [self._listen(listening, self._certificate) for listening in sockets or ()]
        self.is_listening.set()

    def _listen(self, listening: socket.socket, certificate: Certificate) -> TlsListener:
        protocol: Any = self.config.http_protocol_class
        return TlsListener(
            listening,
            certificate,
            backlog=_BACKLOG,
            connections=self._connections,
            make_protocol=functools.partial(
                protocol,
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
            ),
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening and end the connections."""
        for listener in self._tls:
            await listener.close()
        await super().shutdown(sockets=sockets)


def http_config(config: ServiceConfig, app: App, connections: OpenConnections) -> uvicorn.Config:
    """Return how uvicorn serves `app` to these connections."""
    return uvicorn.Config(
        app,
        interface="asgi3",
        loop="uvloop",
        http=bounded_protocol(connections, timeout_ms=config.keep_alive_timeout_ms),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )


def _within_open_files(config: ServiceConfig) -> ServiceConfig:
    """Allow as many open files as the system does, and no more connections than half of them.

    Fewer requests than connections: who comes when all requests are taken is heard and answered.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    wanted = config.connections_max + config.buckets_max * _FILES_A_BUCKET
    if hard < wanted:
        _logger.debug("event=few_open_files limit=%d full_service_needs=%d", hard, wanted)
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
