"""`streamhouse cdc` beside Debezium's engine alone, which delivers into nothing: processor a row.

Both run in this process on one PostgreSQL, in turns; the service and the database are processes of
their own, whose work is not counted. The rows of the wall are told beside it.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import median, report
from integration.judges.environment import judge_python
from integration.judges.postgres_server import USER, PostgresServer
from streamhouse.api.client import StreamhouseClient
from streamhouse.cdc_source._debezium_engine import EngineSettings
from streamhouse.cdc_source._java import implements, java_class, start_java
from streamhouse.cdc_source._source_database import SourceDatabase
from streamhouse.cdc_source._stream_progress import ProgressTable
from streamhouse.cdc_source.follower import Follower
from streamhouse.cdc_source.source_address import SourceAddress
from streamhouse.cdc_source.stream_options import StreamOptions
from streamhouse.client import StorageClient
from tests.support.service_process import ServiceProcess

ROWS: Final = 200_000
TRANSACTION_ROWS: Final = 1_000
PAIRS: Final = 3
NAME: Final = "bench"
_BARE_SLOT: Final = "bare"


@dataclass(frozen=True, slots=True)
class Cost:
    """What moving some rows took."""

    cpu_s: float
    wall_s: float

    @classmethod
    def of(cls, work: Callable[[], None]) -> Cost:
        """Do `work` and measure it: all threads of this process, Java's among them."""
        cpu, wall = time.process_time(), time.perf_counter()
        work()
        return cls(time.process_time() - cpu, time.perf_counter() - wall)


class World:
    """A database with one table, and a service."""

    def __init__(self, server: PostgresServer, service: ServiceProcess) -> None:
        self.server = server
        self.client = StreamhouseClient(service.endpoint)
        password = server.environment()["PGPASSWORD"]
        url = f"postgres://{USER}@127.0.0.1:{server.port}/postgres"
        self.address = SourceAddress.parse(url, password=password)
        self.positions = ProgressTable(StorageClient.of(self.client), NAME)
        server.sql(
            "CREATE TABLE events (id int PRIMARY KEY, customer text, amount float8,"
            " ts timestamptz, status text)",
            "INSERT INTO events SELECT i, 'cust' || lpad((i % 100000)::text, 8, '0'), i * 0.37,"
            f" now(), 'shipped' FROM generate_series(1, {ROWS}) i",
        )

    def lsn(self) -> int:
        """Return how far our table is; 0 before its snapshot is whole."""
        progress = self.positions.load(NAME)
        return 0 if progress is None else progress.lsn or 0

    def follow(self, until: Callable[[], bool], *, snapshot: bool) -> None:
        """Run what the command runs, until our table is there."""
        options = StreamOptions(patterns=["public.*"], database=NAME, name=NAME, snapshot=snapshot)
        stop = threading.Event()
        follower = Follower(
            StorageClient.of(self.client), self.address, options, say=lambda _: None
        )
        thread = threading.Thread(target=follower.run, args=(stop,))
        thread.start()
        while thread.is_alive() and not until():
            time.sleep(0.1)
        stop.set()
        thread.join()

    def change(self) -> int:
        """Change every row, in transactions; return the position after them."""
        for start in range(1, ROWS + 1, TRANSACTION_ROWS):
            end = start + TRANSACTION_ROWS - 1
            self.server.sql(
                f"UPDATE events SET amount = amount + 1 WHERE id BETWEEN {start} AND {end}"
            )
        ((before,),) = [self.server.sql("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn")]
        self.server.sql("UPDATE events SET amount = 0 WHERE id = 1")
        return int(before)

    def bare(self, *, start_lsn: int | None, slot: str) -> None:
        """Run Debezium alone until it has delivered all rows, and tell it nothing."""
        with SourceDatabase(self.address) as source:
            tables = source.tables(["public.*"])
        settings = EngineSettings(
            address=self.address,
            slot=slot,
            publication=f"streamhouse_{NAME}",
            tables=tables,
            start_lsn=start_lsn,
            placeholder="__unchanged",
        )
        seen = 0
        has_all = threading.Event()

        def take(records: Any, committer: Any) -> None:
            nonlocal seen
            seen += records.size()
            committer.markBatchFinished()
            if seen >= ROWS:
                has_all.set()

        with tempfile.TemporaryDirectory() as folder:
            offsets = Path(folder, "offsets")
            settings.write_offsets(offsets)
            _deliver(settings.properties(offsets), take, has_all)

    def drop_bare_slot(self) -> None:
        """Forget where the engine alone has read its snapshot."""
        with SourceDatabase(self.address) as source:
            source.drop_slot(_BARE_SLOT, wait_s=60.0)


def _deliver(
    given: dict[str, str], take: Callable[[Any, Any], None], has_all: threading.Event
) -> None:
    properties = java_class("java.util.Properties")()
    for name, value in given.items():
        properties.setProperty(name, value)
    consumer = implements(
        "io.debezium.engine.DebeziumEngine$ChangeConsumer",
        handleBatch=take,
        supportsTombstoneEvents=lambda: False,
    )
    engine = (
        java_class("io.debezium.engine.DebeziumEngine")
        .create(java_class("io.debezium.engine.format.Json").class_)
        .using(properties)
        .notifying(consumer)
        .build()
    )
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    assert has_all.wait(600), "Debezium delivers nothing"
    engine.close()
    thread.join()


def main() -> None:
    """Run the benchmark."""
    (packages,) = (judge_python("cdc").parents[1] / "lib").glob("python*/site-packages")
    sys.path.append(str(packages))
    start_java()
    with (
        tempfile.TemporaryDirectory() as folder,
        PostgresServer("wal_level=logical", with_driver=False) as server,
        ServiceProcess(Path(folder)) as service,
    ):
        world = World(server, service)
        snapshots: list[tuple[Cost, Cost]] = []
        streams: list[tuple[Cost, Cost]] = []
        for _ in range(PAIRS + 1):
            start = world.lsn()
            ours = Cost.of(
                lambda: world.follow(lambda: world.lsn() > start, snapshot=True)  # noqa: B023
            )
            bare = Cost.of(lambda: world.bare(start_lsn=None, slot=_BARE_SLOT))
            world.drop_bare_slot()
            snapshots.append((bare, ours))

            start = world.lsn()
            end = world.change()
            slot = f"streamhouse_{NAME}"
            bare = Cost.of(lambda: world.bare(start_lsn=start, slot=slot))  # noqa: B023
            ours = Cost.of(
                lambda: world.follow(lambda: world.lsn() > end, snapshot=False)  # noqa: B023
            )
            streams.append((bare, ours))
        # The first pair warms Java up.
        _tell("snapshot", snapshots[1:])
        _tell("stream", streams[1:])


def _tell(name: str, pairs: list[tuple[Cost, Cost]]) -> None:
    bare, ours = (median([pair[side].cpu_s for pair in pairs]) for side in (0, 1))
    wall_bare, wall_ours = (median([pair[side].wall_s for pair in pairs]) for side in (0, 1))
    report(
        name=f"cdc {name}, {ROWS:,} rows",
        measured=f"{ROWS / ours:,.0f} rows a second of processor, {ROWS / wall_ours:,.0f} of wall",
        limit=f"{ROWS / bare:,.0f} and {ROWS / wall_bare:,.0f} by Debezium into nothing",
        ratio=bare / ours,
        bar="not set",
        reached=None,
    )


if __name__ == "__main__":
    main()
