"""A service whose disk refuses or fails: what every kind of write is told, and what is there then.

Each test has tables of every kind, writes to all of them while the disk fails, and compares what is
stored with what was acknowledged. RocksDB's own files are in test_full_disk.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import (
    StorageFailedError,
    StreamhouseError,
    UnavailableError,
    UnknownOutcomeError,
)
from tests.support.command_line import streamhouse
from tests.support.failing_disk import DISK_FAULTS, command
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
KEYS = pa.schema([SCHEMA.field("id")])
# Retries of the client are of no use while the disk fails.
TIMEOUT_S = 2.0
REFUSALS = (StorageFailedError, UnknownOutcomeError, UnavailableError)


def rows(*ids: int, name: str = "x") -> pa.Table:
    return pa.table({"id": ids, "name": [name] * len(ids)}, schema=SCHEMA)


class World:
    """Tables of every kind with some rows, and the calls that change something."""

    def __init__(self, client: StreamhouseClient) -> None:
        self.client = client
        for name, key in (("log", ()), ("keys", ["id"]), ("staged", ()), ("merged", ["id"])):
            client.create_table(name, SCHEMA, primary_key=key)
        client.append("log", rows(*range(100)))
        client.upsert("keys", rows(*range(100), name="base"))
        self.transactions = {
            "staged": client.begin_transaction("staged"),
            "merged": client.begin_transaction("merged", operation="upsert"),
        }
        self.parts = {
            name: [transaction.stage(rows(*range(1_000)))]
            for name, transaction in self.transactions.items()
        }

    def calls(self, number: int) -> dict[str, Callable[[], object]]:
        """Return calls by name; all of one number are different from those of another."""
        client, many = self.client, range(number * 1_000, number * 1_000 + 50)
        return {
            "append": lambda: client.append("log", rows(*many)),
            "upsert": lambda: client.upsert("keys", rows(*many)),
            "delete": lambda: client.delete("keys", pa.table({"id": [number]}, schema=KEYS)),
            "begin": lambda: client.begin_transaction("staged", app_id="a", version=number),
            "stage": lambda: self.transactions["staged"].stage(rows(5)),
            "create_table": lambda: client.create_table(f"new_{number}", SCHEMA),
            "create_database": lambda: client.create_database(f"base_{number}"),
            "add_column": lambda: client.add_column("log", f"column_{number}", pa.string()),
            "alter": lambda: client.alter_properties(
                "log", updates={"table.log.ttl": f"{number + 1}d"}
            ),
        }

    def try_all(self, number: int) -> dict[str, StreamhouseError | None]:
        """Make all calls at once; return what became of each."""

        def outcome(call: Callable[[], object]) -> StreamhouseError | None:
            try:
                call()
            except StreamhouseError as error:
                return error
            return None

        calls = self.calls(number)
        with ThreadPoolExecutor(len(calls)) as pool:
            return dict(zip(calls, pool.map(outcome, calls.values()), strict=True))

    def commit_all(self) -> None:
        for name, transaction in self.transactions.items():
            transaction.commit(self.parts[name], timeout_s=TIMEOUT_S)

    def check_reads(self) -> None:
        """What was acknowledged before the disk failed is there."""
        ids = self.client.read("log", columns=["id"])["id"].to_pylist()
        assert set(ids) >= set(range(100))
        assert len(set(ids)) == len(ids)
        found = self.client.lookup("keys", pa.table({"id": range(50, 100)}, schema=KEYS))
        assert found["name"].to_pylist() == ["base"] * 50

    def check_end(self, acknowledged: Collection[int], *, refused: Collection[int]) -> None:
        """Rows of acknowledged calls are there, those of refused ones are not."""
        self.check_reads()
        ids = {
            "log": self.client.read("log", columns=["id"])["id"].to_pylist(),
            "keys": self.client.read("keys", columns=["id"])["id"].to_pylist(),
        }
        for table, found in ids.items():
            assert len(set(found)) == len(found), f"{table} has rows twice"
            for number in acknowledged:
                assert set(found) >= set(range(number * 1_000, number * 1_000 + 50)), table
            for number in refused:
                assert not set(found) & set(range(number * 1_000, number * 1_000 + 50)), table
        for table in self.transactions:
            assert sorted(self.client.read(table)["id"].to_pylist()) == list(range(1_000))


@contextlib.contextmanager
def failing(folder: Path, kind: str) -> Iterator[tuple[ServiceProcess, World]]:
    """A service at work whose disk has begun to fail, which it does while `switch(folder)` is."""
    fault = command(kind, "while", switch(folder))
    with (
        ServiceProcess(folder / "data", command=fault) as service,
        StreamhouseClient(service.endpoint, timeout_s=TIMEOUT_S) as client,
    ):
        world = World(client)
        switch(folder).touch()
        yield service, world


def switch(folder: Path) -> Path:
    return folder / "failing"


@contextlib.contextmanager
def restarted(folder: Path, world: World, *, timeout_s: float = TIMEOUT_S) -> Iterator[None]:
    """A new service on the same files and a good disk; what it leaves is whole."""
    with (
        ServiceProcess(folder / "data") as service,
        StreamhouseClient(service.endpoint, timeout_s=timeout_s) as world.client,
    ):
        yield
        end_well(folder, service)


def end_well(folder: Path, service: ServiceProcess) -> None:
    assert service.terminate() == 0
    streamhouse("check", "--data-dir", folder / "data")


def test_a_full_disk_refuses_every_write_and_all_goes_on_once_there_is_room(
    tmp_path: Path,
) -> None:
    with failing(tmp_path, "disk-full") as (service, world):
        for name, error in world.try_all(1).items():
            assert type(error) is StorageFailedError, f"{name}: {error!r}"
            assert error.retriable
        for name, transaction in world.transactions.items():
            with pytest.raises(StorageFailedError):
                transaction.commit(world.parts[name], timeout_s=TIMEOUT_S)
        world.check_reads()

        switch(tmp_path).unlink()
        assert set(world.try_all(2).values()) == {None}
        # What was refused can be done again; nothing of it is in the way.
        assert world.try_all(1)["create_table"] is None
        world.commit_all()
        world.check_end([1, 2], refused=[])
        end_well(tmp_path, service)


def test_after_a_failed_sync_a_bucket_is_read_only_and_says_so_until_a_restart(
    tmp_path: Path,
) -> None:
    with failing(tmp_path, "sync-fails") as (service, world):
        # Its outcome is not known, and the repetition meets a bucket that takes nothing.
        first = world.try_all(1)
        for name in ("append", "upsert"):
            assert isinstance(first[name], REFUSALS), f"{name}: {first[name]!r}"
        switch(tmp_path).unlink()
        second = world.try_all(2)
        for name in ("append", "upsert"):
            assert isinstance(second[name], StorageFailedError)
            assert "read-only" in str(second[name])
            assert "restart" in str(second[name])
        # Tables whose logs are not concerned go on.
        assert second["create_table"] is second["stage"] is second["add_column"] is None
        world.commit_all()
        world.check_reads()
        service.kill()
    with restarted(tmp_path, world):
        assert world.try_all(3)["append"] is None
        world.check_end([3], refused=[2])


@pytest.mark.parametrize("kind", ["names-fail", "all-fails"])
def test_whatever_fails_every_call_gets_a_clear_answer_and_a_restart_mends_all(
    tmp_path: Path, kind: str
) -> None:
    with failing(tmp_path, kind) as (service, world):
        for name, error in world.try_all(1).items():
            assert error is None or isinstance(error, REFUSALS), f"{name}: {error!r}"
        world.check_reads()
        switch(tmp_path).unlink()
        again = world.try_all(2)
        for name, error in again.items():
            assert error is None or isinstance(error, REFUSALS), f"{name}: {error!r}"
            assert error is None or not DISK_FAULTS[kind].goes_on, f"{name}: {error!r}"
        service.kill()
    with restarted(tmp_path, world, timeout_s=30):
        world.transactions = {
            name: world.client.open_transaction(name, transaction.transaction_id)
            for name, transaction in world.transactions.items()
        }
        assert set(world.try_all(3).values()) == {None}
        world.commit_all()
        world.check_end([3], refused=[])
