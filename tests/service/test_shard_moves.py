"""`streamhouse shards move` between real processes: there and back, with rows that go on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from streamhouse.cli import cli
from streamhouse.client import StorageClient
from streamhouse.core.errors import StreamhouseError
from tests.support.in_process_service import EVENTS, event_rows
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def _service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with ServiceProcess(
        tmp_path / "data",
        "--shards",
        "2",
        "--journal",
        f"file://{tmp_path / 'store'}",
        "--lease-ms",
        "2000",
        is_executed=True,
    ) as service:
        yield service


def _shard_of(client: StorageClient, table: str) -> str:
    tables = client.status()["tables"]
    return next(str(t["shard"]) for t in tables if t["table"] == f"default.{table}")


def _pid_of(service: ServiceProcess, shard: str) -> int:
    for child in Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text().split():
        arguments = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if arguments[arguments.index(b"--shard") + 1] == shard.encode():
            return int(child)
    raise AssertionError(shard)


def _other(shard: str) -> str:
    return "1" if shard == "0" else "0"


def _rows(start: int, end: int) -> pa.Table:
    return pa.Table.from_batches([event_rows(start, end)], EVENTS)


def _logged(client: StorageClient) -> list[int]:
    end = client.positions("log")[0].high_watermark
    batches = client.read_range("log", 0, 0, end)
    return [i for batch in batches for i in batch.data.column("id").to_pylist()]


def _cli(service: ServiceProcess, *arguments: str) -> None:
    done = CliRunner().invoke(cli, ["shards", *arguments, "--endpoint", service.endpoint])
    assert done.exit_code == 0, done.output


def test_tables_move_there_and_back_while_a_client_goes_on(tmp_path: Path) -> None:
    with _service(tmp_path) as service, StorageClient(service.endpoint) as client:
        client.create_table("log", EVENTS)
        client.create_table("keys", EVENTS, primary_key=["id"])
        client.append("log", _rows(0, 10))
        client.upsert("keys", _rows(0, 10))
        assert tier_once(client) == 20
        client.upsert("keys", _rows(5, 15))
        for end in (10, 20):
            for table in ("log", "keys"):
                home = _shard_of(client, table)
                before = client.positions(table)
                _cli(service, "move", table, "--to", _other(home))
                assert _shard_of(client, table) == _other(home)
                assert client.positions(table) == before
            # The same client, with the sequences that follow.
            client.append("log", _rows(end, end + 10))
            assert _logged(client) == list(range(end + 10))
            assert client.count("keys") == 15
            client.upsert("keys", _rows(14, 15))
            # The lake goes on where it was, from the shard that has the table now.
            assert tier_once(client, "log") == 10
    with _service(tmp_path) as service, StorageClient(service.endpoint) as client:
        assert _logged(client) == list(range(30))
        assert client.count("keys") == 15


def test_writers_and_readers_go_on_while_tables_move(tmp_path: Path) -> None:
    """Nobody gets an error, no row is lost or double, and who has written reads it."""
    with _service(tmp_path) as service, StorageClient(service.endpoint) as client:
        client.create_table("log", EVENTS)
        client.create_table("keys", EVENTS, primary_key=["id"], bucket_count=2)
        is_over = threading.Event()
        done = {"log": 0, "keys": 0}
        wrong: list[object] = []

        def write(table: str) -> None:
            try:
                with StorageClient(service.endpoint) as writer:
                    while not is_over.is_set():
                        number = done[table]
                        if table == "log":
                            writer.append(table, _rows(number, number + 1))
                            end = writer.positions(table)[0].high_watermark
                            is_read = end == number + 1
                        else:
                            writer.upsert(table, _rows(number, number + 1))
                            is_read = writer.count(table) == number + 1
                        if not is_read:
                            wrong.append((table, number, "is not read by who wrote it"))
                        done[table] = number + 1
            except StreamhouseError as error:
                wrong.append((table, error))

        writers = [threading.Thread(target=write, args=(table,)) for table in done]
        for writer in writers:
            writer.start()
        for _ in range(2):
            for table in done:
                before = done[table]
                client.move_table(table, _other(_shard_of(client, table)))
                while done[table] == before and all(w.is_alive() for w in writers):
                    client.positions(table)
        is_over.set()
        for writer in writers:
            writer.join()
        assert not wrong
        assert _logged(client) == list(range(done["log"]))
        assert client.count("keys") == done["keys"]


def _move(service: ServiceProcess, table: str, shard: str) -> None:
    """Move a table, or be told that it is not known what became of that."""
    with contextlib.suppress(StreamhouseError), StorageClient(service.endpoint) as client:
        client.move_table(table, shard)


@pytest.mark.parametrize(
    "dies", [*(pytest.param(one, marks=pytest.mark.long) for one in ("source", "target")), "both"]
)
def test_processes_are_killed_in_the_middle(tmp_path: Path, dies: str) -> None:
    with _service(tmp_path) as service, StorageClient(service.endpoint) as client:
        client.create_table("log", EVENTS)
        # Many files: the move takes its time.
        client.create_table("keys", EVENTS, primary_key=["id"], bucket_count=64)
        for number in range(5):
            client.append("log", _rows(number, number + 1))
            client.upsert("keys", _rows(number * 100, number * 100 + 100))
        for table in ("keys", "log"):
            home = _shard_of(client, table)
            errors: list[BaseException] = []

            def move(
                table: str = table, home: str = home, errors: list[BaseException] = errors
            ) -> None:
                try:
                    with StorageClient(service.endpoint) as other:
                        other.move_table(table, _other(home))
                except StreamhouseError as error:
                    errors.append(error)

            shards = {"source": [home], "target": [_other(home)], "both": [home, _other(home)]}
            victims = [_pid_of(service, shard) for shard in shards[dies]]
            moving = threading.Thread(target=_move, args=(service, table, _other(home)))
            moving.start()
            moving.join(0.15)
            for victim in victims:
                os.kill(victim, signal.SIGKILL)
            moving.join()
            # Whoever has it now: it is there, and the command may be repeated.
            client.upsert("keys", _rows(0, 1))
            assert client.count("keys") == 500
            client.move_table(table, _other(home))
            assert _shard_of(client, table) == _other(home)
        assert _logged(client) == [0, 1, 2, 3, 4]
        assert client.count("keys") == 500
