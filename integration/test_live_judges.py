"""Live tables of a service that is killed, judged by every engine.

Each life is a table that is written, tiered, compacted, evolved, dropped and made again, in an
order that its seed draws, by a service that dies by kill -9 meanwhile. A third of the lives are in
Iceberg's format version 2, a third in 3, and a third go from 2 to 3 at a step. After each step the
live table is loaded from the REST catalog; stock pyiceberg, DuckDB and our own read must find the
model's rows at once, and Iceberg Java in every cut that was loaded, as long as its files are there.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
from duckdb import DuckDBPyConnection
from pyiceberg.schema import Schema

from integration.judges.duckdb_read import connect
from integration.judges.engines import read_many_with_spark35
from integration.judges.every_lake import LeftTable, in_one_form, pyiceberg_rows
from integration.judges.every_type import SCHEMA, row
from integration.judges.format_versions import EVERY
from streamhouse.api.client import StreamhouseClient
from tests.support.command_line import streamhouse
from tests.support.examples import examples
from tests.support.free_ports import free_port
from tests.support.live_tables import attach_live, live_catalog
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIVES: Final = examples(10)
STEPS: Final = 12
KEY: Final = pa.schema([SCHEMA.field("id")])
KEYS: Final = 40
PARTITIONS: Final = (
    (),
    ("name",),
    ("day(ts)", "flag"),
    ("bucket(2, price)", "truncate(10, number)"),
    ("month(day)",),
    ("truncate(1, raw)", "hour(ts_ntz)"),
)
PROPERTIES: Final = {
    "table.datalake.snapshot.max-age": "1ms",
    "table.datalake.snapshot.min-count": "1",
    "table.datalake.auto-maintenance": "false",
}
# Each change of the schema once, in this order: a name that comes back is another column.
EVOLUTION: Final[tuple[dict[str, Any], ...]] = (
    {"add": "more", "type": "int"},
    {"widen": "more", "to": "bigint"},
    {"rename": "more", "to": "most"},
    {"widen": "number", "to": "bigint"},
    {"drop": "most", "confirm": "most"},
    {"add": "more", "type": "int"},
    {"rename": "amount", "to": "total"},
    {"drop": "small", "confirm": "small"},
    {"add": ["place", "zip"], "type": "string"},
)


@dataclass(frozen=True)
class Cut:
    """A live table as it was loaded, and its rows in one form."""

    table: LeftTable
    schema: Schema
    rows: list[str]


class Home:
    """A service on one directory and one address, which comes back after it was killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = str(free_port())
        self._opened = contextlib.ExitStack()
        self.deaths = 0
        self._start()

    def _start(self) -> None:
        arguments = ("--port", self._port)
        self._service = self._opened.enter_context(
            ServiceProcess(self._folder / "data", *arguments)
        )
        self.endpoint = self._service.endpoint

    def kill(self) -> None:
        """Kill -9 the service and start it again."""
        self._service.kill()
        self.deaths += 1
        self._start()

    def close(self) -> None:
        self._opened.close()


class Life:
    """One table: the dict of rows that it must have, and the cuts that were loaded of it."""

    def __init__(
        self, home: Home, client: StreamhouseClient, readers: DuckDBPyConnection, seed: int
    ) -> None:
        self.home, self.client, self.duckdb = home, client, readers
        self.random = random.Random(seed)
        self.name = f"life_{seed}"
        self.path = f"default.{self.name}"
        self.is_keyed = seed % 3 != 0
        self.version = EVERY[seed // 3 % 3]
        self.cuts: list[tuple[Cut, int]] = []
        self.create()

    def create(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self.next_id = 0
        self.changes = iter(EVOLUTION)
        self.client.create_table(
            self.path,
            SCHEMA,
            primary_key=["id"] if self.is_keyed else [],
            bucket_count=2,
            partitioned_by=self.random.choice(PARTITIONS),
            properties={**PROPERTIES, **self.version.properties},
        )

    def live(self) -> None:
        """Play the life: each kind of step now and then, most of them writes."""
        self.judge()
        steps = (self.write, self.write, self.write, self.delete, self.tier, self.tier)
        rare = (self.maintain, self.evolve, self.evolve, self.lay_out, self.home.kill)
        self.write()
        for number in range(STEPS):
            step = self.random.choice((*steps, *rare))
            step()
            if number == STEPS // 2 and self.random.random() < 0.3:
                self.recreate()
            if number == STEPS // 2 and self.version.upgrade:
                self.client.alter_properties(self.path, updates=self.version.upgrade)
            self.judge()

    def write(self) -> None:
        numbers = self.random.sample(range(KEYS), 12)
        if not self.is_keyed:
            numbers = list(range(self.next_id, self.next_id + 12))
        self.next_id += 12
        version = self.random.randrange(30)
        schema = self.client.describe_table(self.path).schema.to_arrow()
        rows = pa.Table.from_pylist([_row(number, version) for number in numbers], schema=schema)
        write = self.client.upsert if self.is_keyed else self.client.append
        write(self.path, rows)
        self.rows |= dict(zip(numbers, rows.to_pylist(), strict=True))

    def delete(self) -> None:
        if not self.is_keyed:
            return
        numbers = self.random.sample(range(KEYS), 6)
        self.client.delete(self.path, pa.table({"id": numbers}, schema=KEY))
        for number in numbers:
            self.rows.pop(number, None)

    def tier(self) -> None:
        tier_once(self.client, self.path)

    def maintain(self) -> None:
        """Compact, and expire every snapshot that nobody holds."""
        streamhouse("maintain", self.path, "--endpoint", self.home.endpoint)

    def lay_out(self) -> None:
        partitioned_by = self.random.choice(PARTITIONS)
        self.client.alter_partitioning(self.path, partitioned_by)

    def recreate(self) -> None:
        self.client.drop_table(self.path)
        self.create()

    def evolve(self) -> None:
        change = next(self.changes, None)
        if change is None:
            return
        self.client.alter_schema(self.path, [change])
        for values in self.rows.values():
            if "rename" in change:
                values[change["to"]] = values.pop(change["rename"])
            elif "drop" in change:
                values.pop(change["drop"])
            elif change.get("add") == "more":
                values["more"] = None
            elif "add" in change and values["place"] is not None:
                values["place"]["zip"] = None

    def judge(self) -> None:
        """Load the live table; all who are quick find the model's rows."""
        opened = live_catalog(self.home.endpoint).load_table(self.path)
        schema = opened.schema()
        rows = self.in_one_form(schema, list(self.rows.values()))
        table = LeftTable(Path(self.path), str(len(self.cuts)), opened.metadata_location)
        self.cuts.append((Cut(table, schema, rows), self.home.deaths))
        assert self.in_one_form(schema, opened.scan().to_arrow().to_pylist()) == rows
        by_duckdb = self.duckdb.execute(f'SELECT * FROM live."default".{self.name}')
        assert self.in_one_form(schema, by_duckdb.to_arrow_table().to_pylist()) == rows
        assert self.in_one_form(schema, self.client.read(self.path).to_pylist()) == rows

    def in_one_form(self, schema: Schema, rows: list[dict[str, Any]]) -> list[str]:
        return in_one_form(schema, rows, hides=True)

    def readable(self) -> Iterator[Cut]:
        """Yield the cuts that are as they were: all since the last death, and those before it whose
        files no maintenance has taken since."""
        for cut, deaths in self.cuts:
            read = pyiceberg_rows(cut.table)
            if read is None:
                assert deaths < self.home.deaths, f"{cut.table}: its files are gone"
                continue
            assert self.in_one_form(cut.schema, read[1]) == cut.rows, str(cut.table)
            yield cut


def _row(number: int, version: int) -> dict[str, Any]:
    """Return row `number` with values that differ by version: partition values move."""
    values = row(number * 7 + version * 5)
    return values | {"id": number, "total": values["amount"], "more": version, "most": version}


@pytest.fixture(scope="module")
def cuts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Cut]]:
    home = Home(tmp_path_factory.mktemp("live"))
    with (
        contextlib.closing(home),
        StreamhouseClient(home.endpoint) as client,
        connect() as duckdb,
    ):
        attach_live(duckdb, home.endpoint)
        lives = [Life(home, client, duckdb, seed) for seed in range(LIVES)]
        for life in lives:
            life.live()
        yield [cut for life in lives for cut in life.readable()]


@pytest.mark.end_to_end
def test_stock_pyiceberg_duckdb_and_we_read_what_a_dict_holds(cuts: list[Cut]) -> None:
    # All but those whose files expired after a death.
    assert len(cuts) > LIVES * STEPS // 2


@pytest.mark.judge
def test_iceberg_java_reads_what_a_dict_holds(cuts: list[Cut]) -> None:
    requests = [(cut.table.location, "SELECT * FROM lake_table") for cut in cuts[::2]]
    for cut, rows in zip(cuts[::2], read_many_with_spark35(requests), strict=True):
        assert in_one_form(cut.schema, rows, hides=True) == cut.rows, cut.table
