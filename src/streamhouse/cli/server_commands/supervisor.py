"""`streamhouse serve --shards N`: a process for each shard on this machine, and their supervisor.

The supervisor binds the service's address and passes the socket to every shard: any shard that is
up answers at the address, and tells clients where a table is. The supervisor holds no data and
answers no requests. A dead shard is restarted, after growing pauses. A shard whose supervisor is
gone stops by itself: the shard reads from a pipe which only the supervisor keeps open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamhouse.core.backoff import Backoff
from streamhouse.core.errors import InvalidRequestError, UnavailableError
from streamhouse.core.threads import NamedThread
from streamhouse.storage_service.config import SHARED_SOCKET_VARIABLE

__all__ = ["ShardCommand", "is_supervised", "shard_commands", "stop_with_supervisor", "supervise"]

_logger = logging.getLogger(__name__)

SUPERVISOR_VARIABLE: Final = "STREAMHOUSE_SUPERVISOR_PIPE"
"""The file descriptor that ends when the supervisor is gone."""
READY_PREFIX: Final = "streamhouse listening on "
KAFKA_PREFIX: Final = "streamhouse serving Kafka clients on "
_PORT_MAX: Final = 65_535

_BACKOFF: Final = Backoff(first_s=0.5, most_s=30.0)
# A process that has run for so long is healthy: its earlier failures no longer count.
_STEADY_S: Final = 60.0
_LINE_BYTES_MAX: Final = 1 << 20
_BACKLOG: Final = 2_048


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCommand:
    """The command line of one shard's process."""

    shard: str
    arguments: tuple[str, ...]
    is_first: bool = False
    """Whether the shard has the tables of a former single service; the other shards start after it.
    """


def shard_commands(
    arguments: Sequence[str],
    *,
    count: int,
    data_dir: Path,
    has_own_catalog: bool,
    has_warehouse: bool,
    kafka_port: int | None = None,
    kafka_advertised: tuple[str, int] | None = None,
) -> list[ShardCommand]:
    """Return the commands of `count` shards.

    `arguments` are the common arguments of `serve`; environment and file are inherited. Each shard
    has its own port for Kafka clients: the first shard's port plus the shard's number. Shard 0
    keeps the data directory of a former single service. Without a configured catalog the shards
    share a catalog beside their directories.
    """
    lake = data_dir.absolute() / "lake"
    catalog = (
        ()
        if has_own_catalog
        else (
            *("--catalog-property", "type=sql"),
            *("--catalog-property", f"uri=sqlite:///{lake / 'catalog.db'}"),
        )
    )
    shared_warehouse = ("--warehouse", f"file://{lake / 'warehouse'}")
    warehouse = () if has_own_catalog or has_warehouse else shared_warehouse
    return [
        ShardCommand(
            shard=str(number),
            is_first=_data_dir(data_dir, number) == data_dir,
            arguments=(
                *("--data-dir", str(_data_dir(data_dir, number))),
                *("--shard", str(number), "--port", "0"),
                *catalog,
                *warehouse,
                *_kafka_arguments(number, kafka_port, kafka_advertised),
                *arguments,
            ),
        )
        for number in range(count)
    ]


def _kafka_arguments(
    number: int, port: int | None, advertised: tuple[str, int] | None
) -> tuple[str, ...]:
    if port is None:
        return ()
    port_of_shard = port + number if port else 0
    advertised_port = advertised[1] + number if advertised is not None else 0
    if max(port_of_shard, advertised_port) > _PORT_MAX:
        raise InvalidRequestError(
            f"--kafka-port: shard {number} would have port"
            f" {max(port_of_shard, advertised_port)}, above {_PORT_MAX}; choose a lower port"
        )
    port_arguments = ("--kafka-port", str(port_of_shard))
    return (
        port_arguments
        if advertised is None
        else (*port_arguments, "--kafka-advertise", f"{advertised[0]}:{advertised_port}")
    )


def _data_dir(root: Path, number: int) -> Path:
    if number == 0 and (root / "service.json").exists():
        return root
    return root / "shards" / str(number)


def is_supervised() -> bool:
    """Return whether this process is a shard of a supervisor."""
    return SUPERVISOR_VARIABLE in os.environ


def stop_with_supervisor() -> None:
    """Stop this process, as SIGTERM does, when its supervisor is gone."""
    descriptor = os.environ.pop(SUPERVISOR_VARIABLE, None)
    if descriptor is None:
        return

    def watch() -> None:
        # Nothing is ever written: the read ends when the supervisor's end of the pipe is closed.
        os.read(int(descriptor), 1)
        os.kill(os.getpid(), signal.SIGTERM)

    NamedThread("supervisor", watch).start()


def supervise(
    commands: Sequence[ShardCommand],
    *,
    host: str,
    port: int,
    scheme: str,
    program: Sequence[str],
    described: Callable[[str], str],
    is_kafka: bool = False,
) -> None:
    """Run the shards until SIGTERM or Ctrl-C, and stop them all.

    With `is_kafka` each shard also serves Kafka clients. `program` starts `streamhouse serve`.
    `described` returns the lines below the ready line, given the endpoint.
    Raises `UnavailableError` if a shard ends before it has ever served.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise InvalidRequestError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --port (0 picks"
            " a free one)"
        ) from error
    with contextlib.closing(listening):
        asyncio.run(
            _Supervisor(
                commands,
                listening,
                scheme=scheme,
                program=program,
                described=described,
                is_kafka=is_kafka,
            ).run()
        )


class _Supervisor:
    def __init__(
        self,
        commands: Sequence[ShardCommand],
        listening: socket.socket,
        *,
        scheme: str,
        program: Sequence[str],
        described: Callable[[str], str],
        is_kafka: bool,
    ) -> None:
        self._described = described
        self._is_kafka = is_kafka
        self._kafka: dict[str, str] = {}
        self._commands = commands
        self._listening = listening
        self._program = program
        host, port = listening.getsockname()[:2]
        self._endpoint = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        self._stopping = asyncio.Event()
        self._failed = ""
        self._waiting_for = {command.shard for command in commands}
        self._first = next((command.shard for command in commands if command.is_first), None)
        self._first_is_up = asyncio.Event()
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._read_end, self._write_end = os.pipe()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        try:
            await asyncio.gather(*(self._keep_running(command) for command in self._commands))
        finally:
            os.close(self._write_end)
            os.close(self._read_end)
        if self._failed:
            raise UnavailableError(self._failed)

    def _stop(self) -> None:
        """Ask every shard to stop; each shard gets a second signal, too."""
        self._stopping.set()
        self._first_is_up.set()
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    async def _keep_running(self, command: ShardCommand) -> None:
        """Run a shard, and restart it until the supervisor stops."""
        loop, failures = asyncio.get_running_loop(), 0
        if self._first not in (None, command.shard):
            await self._first_is_up.wait()
        while not self._stopping.is_set():
            started_s = loop.time()
            code = await self._run_once(command)
            if self._stopping.is_set():
                return
            if command.shard in self._waiting_for:
                self._failed = (
                    f"shard '{command.shard}' ended with code {code} before it served; its messages"
                    " are above"
                )
                return self._stop()
            failures = 1 if loop.time() - started_s > _STEADY_S else failures + 1
            pause_s = _BACKOFF.jittered_after(failures)
            _logger.warning(
                "event=shard_ended shard=%s code=%d again_in_s=%.1f", command.shard, code, pause_s
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()

    async def _run_once(self, command: ShardCommand) -> int:
        shared = self._listening.fileno()
        process = await asyncio.create_subprocess_exec(
            *self._program,
            *command.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(os.environ, shared=shared, watched=self._read_end),
            pass_fds=(shared, self._read_end),
            # Ctrl-C is for the supervisor, which passes it on in its own time.
            start_new_session=True,
            limit=_LINE_BYTES_MAX,
        )
        self._running[command.shard] = process
        if self._stopping.is_set():
            process.terminate()
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            await asyncio.gather(
                _each_line(process.stdout, lambda text: self._on_line(command.shard, text)),
                _each_line(process.stderr, lambda text: _write_line(command.shard, text)),
            )
            return await process.wait()
        finally:
            del self._running[command.shard]

    def _on_line(self, shard: str, text: str) -> None:
        _write_line(shard, text)
        if text.startswith(KAFKA_PREFIX):
            self._kafka[shard] = text.removeprefix(KAFKA_PREFIX)
        # With Kafka a shard is ready at its Kafka line, which follows the HTTP line.
        last = KAFKA_PREFIX if self._is_kafka else READY_PREFIX
        if text.startswith(last) and shard in self._waiting_for:
            self._waiting_for.discard(shard)
            if shard == self._first:
                self._first_is_up.set()
            if not self._waiting_for:
                sys.stdout.write(f"{READY_PREFIX}{self._endpoint}\n")
                if self._is_kafka:
                    addresses = ",".join(self._kafka[c.shard] for c in self._commands)
                    sys.stdout.write(f"{KAFKA_PREFIX}{addresses}\n")
                sys.stdout.write(f"{self._described(self._endpoint)}\n")
                sys.stdout.flush()


def _environment(environment: Mapping[str, str], *, shared: int, watched: int) -> dict[str, str]:
    return {
        **environment,
        SHARED_SOCKET_VARIABLE: str(shared),
        SUPERVISOR_VARIABLE: str(watched),
    }


async def _each_line(stream: asyncio.StreamReader, handle: Callable[[str], None]) -> None:
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            # Longer than any line of a log: the part that was read is dropped.
            continue
        if not line:
            return
        handle(line.decode("utf-8", "replace").rstrip("\n"))


def _write_line(shard: str, text: str) -> None:
    """Write a line of a shard with the shard's name, in the line's own format."""
    # A JSON line is an object of a log with --log-format json: the shard is one more field.
    record = f'{{"shard": "{shard}", {text[1:]}' if text.startswith('{"time"') else None
    sys.stderr.write(f"{record or f'shard={shard} {text}'}\n")
    sys.stderr.flush()
