"""A PostgreSQL server, a service, and `streamhouse cdc` between them, each to be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from integration.judges.environment import judge_python
from integration.judges.postgres_server import USER, PostgresServer
from streamhouse.api.client import StreamhouseClient
from streamhouse.cdc_source._stream_progress import ProgressTable
from streamhouse.client import StorageClient
from tests.support.service_process import ServiceProcess

__all__ = ["CdcCommand", "CdcWorld", "open_world", "server", "world"]

_COMMAND: Final = ("-c", "from streamhouse.cli import main; main()", "cdc")
_DEADLINE_S: Final = 120.0


class CdcCommand:
    """One run of the command; what it says goes to a file."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        (packages,) = (judge_python("cdc").parents[1] / "lib").glob("python*/site-packages")
        descriptor, name = tempfile.mkstemp(prefix="streamhouse-cdc-", suffix=".log")
        self._log = Path(name)
        try:
            self.process = subprocess.Popen(
                [sys.executable, *_COMMAND, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                env={**os.environ, "PYTHONPATH": str(packages), **environment},
            )
        finally:
            os.close(descriptor)

    def said(self) -> str:
        """Return all it has printed."""
        return self._log.read_text()

    def finish(self) -> tuple[int, str]:
        """Wait until it ends by itself; return its exit code and what it said."""
        code = self.process.wait(_DEADLINE_S)
        return code, self.said()

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it with a signal, if it runs."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(_DEADLINE_S)

    def clear(self) -> None:
        """End it, and forget what it said."""
        self.end(signal.SIGKILL)
        self._log.unlink()


@dataclass
class CdcWorld:
    """Both ends; `database` is the source's and ours."""

    server: PostgresServer
    folder: Path
    database: str
    service: ServiceProcess
    client: StreamhouseClient
    running: list[CdcCommand] = field(default_factory=list)

    @property
    def url(self) -> str:
        """The source, without a password."""
        return f"postgres://{USER}@127.0.0.1:{self.server.port}/{self.database}"

    def sql(self, *statements: str) -> list[str]:
        """Run statements in the source."""
        return self.server.sql(*statements, database=self.database)

    def follow(self, *arguments: str, url: str | None = None) -> CdcCommand:
        """Start the command; with `url` as its argument and no password beside it."""
        command = CdcCommand(
            [url or self.url, *arguments, "--endpoint", self.service.endpoint],
            {} if url else {"PGPASSWORD": self.server.environment()["PGPASSWORD"]},
        )
        self.running.append(command)
        return command

    def drop(self) -> str:
        """Run `streamhouse cdc drop`; return what it said."""
        command = CdcCommand(
            ["drop", self.url, "--endpoint", self.service.endpoint],
            {"PGPASSWORD": self.server.environment()["PGPASSWORD"]},
        )
        self.running.append(command)
        code, said = command.finish()
        assert code == 0, said
        return said

    def wait_until_read(self, command: CdcCommand) -> None:
        """Wait until our tables have all that the source has committed before this call."""
        ((before,),) = [self.sql("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn")]
        self.sql("INSERT INTO marker DEFAULT VALUES")
        positions = ProgressTable(StorageClient.of(self.client), self.database)

        def is_read() -> bool:
            progress = positions.load(self.database)
            return progress is not None and (progress.lsn or 0) > int(before)

        self._wait(command, is_read)

    def wait_until_said(self, command: CdcCommand, text: str) -> None:
        """Wait until the command has printed `text`."""
        self._wait(command, lambda: text in command.said())

    def wait_until_followed(self, command: CdcCommand, table: str, *, oid: int = 0) -> None:
        """Wait until a table of the source, if given that with this number, is in the stream."""
        positions = ProgressTable(StorageClient.of(self.client), self.database)

        def is_followed() -> bool:
            progress = positions.load(self.database)
            ours = None if progress is None else progress.tables.get(table)
            return ours is not None and oid in (0, ours.oid)

        self._wait(command, is_followed)

    @staticmethod
    def _wait(command: CdcCommand, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not is_so():
            assert command.process.poll() is None, command.said()
            assert time.monotonic() < deadline, command.said()
            time.sleep(0.05)  # sleep: the command tells nobody how far it is

    def rows(self, table: str) -> list[dict[str, Any]]:
        """Return the rows of one of our tables, by its first column."""
        found: list[dict[str, Any]] = self.client.read(f"{self.database}.{table}").to_pylist()
        return sorted(found, key=lambda row: str(next(iter(row.values()))))

    def kill_service(self) -> None:
        """Kill -9 the service, and start it again on its directory and port."""
        port = self.service.endpoint.rpartition(":")[2]
        self.service.kill()
        self.service.__exit__(None, None, None)
        self.service = ServiceProcess(self.folder / "data", "--port", port).__enter__()


@contextlib.contextmanager
def open_world(server: PostgresServer, folder: Path, database: str) -> Iterator[CdcWorld]:
    """Yield a world with an empty source database that has the table `marker`."""
    server.sql(f"CREATE DATABASE {database}")
    server.sql("CREATE TABLE marker (id serial PRIMARY KEY)", database=database)
    service = ServiceProcess(folder / "data").__enter__()
    world = CdcWorld(server, folder, database, service, StreamhouseClient(service.endpoint))
    try:
        yield world
    finally:
        for command in world.running:
            command.clear()
        world.client.close()
        world.service.__exit__(None, None, None)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A source for a module; each test has a database of its own."""
    settings = ("wal_level=logical", "max_replication_slots=40")
    with PostgresServer(*settings, with_driver=False) as started:
        yield started


@pytest.fixture
def world(
    server: PostgresServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[CdcWorld]:
    """Both ends of one test; a file may have a `server` of other settings."""
    name = f"db_{zlib.crc32(request.node.name.encode()):08x}"
    with open_world(server, tmp_path, name) as opened:
        yield opened
