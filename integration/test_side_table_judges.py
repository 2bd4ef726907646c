"""The lake tables beside the rows' own, `$batch` and `$changelog`, judged by other engines.

Tables with and without a primary key, of every type, live through rounds, maintenance and rounds
again. After each step stock pyiceberg and DuckDB, and of some Iceberg Java, must find in the batch
layout the rows of a dict, and in the full history every change to it; so must a union read. In
Iceberg's format version 2 and 3, and in tables that go from 2 to 3 after two rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import StaticTable

from integration.judges.duckdb_read import connect
from integration.judges.engines import read_many_with_spark35
from integration.judges.every_type import SCHEMA, plain, row
from integration.judges.format_versions import EVERY, FormatVersion
from streamhouse.api.client import StreamhouseClient
from streamhouse.client import StorageClient
from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.tiering.worker.maintain_job import maintain_table
from streamhouse.tiering.worker.thread_runner import ThreadRunner
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COUNT = 40
ROWS = f"SELECT {', '.join(SCHEMA.names)} FROM lake_table ORDER BY id"
CHANGES = f"SELECT {', '.join(SCHEMA.names)}, __change_type FROM lake_table ORDER BY id, __offset"
QUERIES = {LakeRole.BATCH: ROWS, LakeRole.CHANGES: CHANGES}
# Of columns of the layouts, for a union read that looks for places.
FILTERS = ("name = 'ü2'", "price < 0", "number > 3 AND ratio < 30")

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A table with a batch layout; one with a primary key keeps its full history too."""

    name: str
    partition: str = ""
    sort: str = ""
    has_key: bool = True
    partitioned_by: tuple[str, ...] = ()

    @property
    def properties(self) -> dict[str, str]:
        layout = {"partition": self.partition, "sort": self.sort}
        return {
            "table.datalake.changelog": str(self.has_key).lower(),
            # Maintenance comes when the test says so.
            "table.datalake.auto-maintenance": "false",
            **{f"table.datalake.batch-layout.{k}": text for k, text in layout.items() if text},
        }


CASES = [
    Case("sorted", sort="amount, name"),
    Case("partitioned", partition="name, bucket(3, price)", partitioned_by=("day(ts)",)),
    Case("z_ordered", partition="day(ts)", sort="zorder(number, ratio, name)"),
    Case("log", sort="price, name", has_key=False),
    Case("log_days", partition="day(ts), flag", sort="zorder(number, wide)", has_key=False),
]


@dataclass
class State:
    """The lake tables beside a table's own after one step, and what each must have."""

    what: str
    locations: dict[LakeRole, str]
    expected: dict[LakeRole, list[Row]]


@dataclass
class History:
    """A table, the dict it must equal, every change to that, and the states it went through."""

    client: StreamhouseClient
    catalog: SqlCatalog
    case: Case
    version: FormatVersion
    rows: dict[int, Row] = field(default_factory=dict)
    changes: list[Row] = field(default_factory=list)
    states: list[State] = field(default_factory=list)

    def write(self, numbers: Sequence[int], version: int) -> None:
        """Write rows with these ids; of a log table, rows that come after those it has."""
        if not self.case.has_key:
            numbers = range(len(self.rows), len(self.rows) + len(numbers))
        rows = [row(number * 7 + version * 5) | {"id": number} for number in numbers]
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        (self.client.upsert if self.case.has_key else self.client.append)(self.case.name, table)
        for new in rows:
            if (old := self.rows.get(new["id"])) is None:
                self._changed("+I", new)
            else:
                self._changed("-U", old)
                self._changed("+U", new)
            self.rows[new["id"]] = new

    def delete(self, numbers: Sequence[int]) -> None:
        if self.case.has_key:
            keys = pa.table({"id": list(numbers)}, pa.schema([SCHEMA.field("id")]))
            self.client.delete(self.case.name, keys)
            for number in numbers:
                if (old := self.rows.pop(number, None)) is not None:
                    self._changed("-D", old)

    def _changed(self, change_type: str, changed: Row) -> None:
        self.changes.append({**changed, "__change_type": change_type})

    def tier(self) -> None:
        self._judge_union_reads()
        tier_once(self.client, self.case.name)
        self.note("round")

    def maintain(self) -> None:
        client, runner = StorageClient.of(self.client), ThreadRunner(2)
        for _ in maintain_table(client, client.lake_catalog(), runner, self.case.name):
            pass
        self.note("maintenance")

    def note(self, what: str) -> None:
        roles = [LakeRole.BATCH, *([LakeRole.CHANGES] if self.case.has_key else [])]
        names = {role: ("default", role.lake_name(self.case.name)) for role in roles}
        changes = sorted(self.changes, key=lambda change: change["id"])
        self.states.append(
            State(
                f"{self.case.name} after {what} {len(self.states)}",
                {
                    role: self.catalog.load_table(name).metadata_location
                    for role, name in names.items()
                },
                {LakeRole.BATCH: self.expected(), LakeRole.CHANGES: plain(changes)},
            )
        )

        self._judge_union_reads()

    def expected(self) -> list[Row]:
        return plain([self.rows[number] for number in sorted(self.rows)])

    def found_by_filter(self) -> dict[str, list[int]]:
        """What each of `FILTERS` selects, by DuckDB on the rows themselves."""
        columns = [name for name in SCHEMA.names if name != "counts"]
        source = pa.Table.from_pylist(list(self.rows.values()), schema=SCHEMA).select(columns)
        with duckdb.connect() as connection:
            connection.execute("SET TimeZone = 'UTC'")
            connection.register("source", source)
            return {
                where: [
                    found[0]
                    for found in connection.execute(
                        f"SELECT id FROM source WHERE {where} ORDER BY id"
                    ).fetchall()
                ]
                for where in FILTERS
            }

    def _judge_union_reads(self) -> None:
        """The judges must agree with these: whole, and as the planner likes by a filter."""
        name = self.case.name
        assert plain(self.client.read(name).sort_by("id").to_pylist()) == self.expected()
        for where, ids in self.found_by_filter().items():
            found = self.client.read(name, columns=["id"], where=where)
            assert sorted(found["id"].to_pylist()) == ids, (name, where)
        if self.case.has_key:
            order = [("id", "ascending"), ("__offset", "ascending")]
            found = self.client.read(f"{name}$changelog").sort_by(order)
            changes = found.select([*SCHEMA.names, "__change_type"]).to_pylist()
            assert plain(changes) == plain(sorted(self.changes, key=lambda c: c["id"]))

    def live(self) -> None:
        """Play the table's life."""
        self.write(range(COUNT), 0)
        self.write(range(0, COUNT, 5), 1)
        self.tier()
        self.write(range(0, COUNT, 3), 2)
        self.delete(range(0, COUNT, 7))
        self.tier()
        if upgrade := self.version.upgrade:
            self.client.alter_properties(self.case.name, updates=upgrade)
        # Reinserts, and a row that comes and goes within the round.
        self.write([0, 7, COUNT, COUNT + 1], 3)
        self.delete([COUNT + 1, 14])
        self.tier()
        self.maintain()
        # What maintenance has packed and sorted anew is retracted in turn.
        self.write(range(1, COUNT, 4), 4)
        self.delete(range(2, COUNT, 11))
        self.tier()
        for version in range(5, 7):
            self.write(range(version, COUNT, 9), version)
            self.tier()
        self.maintain()


@pytest.fixture(scope="module", params=EVERY, ids=str)
def histories(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[list[History]]:
    with (
        ServiceProcess(tmp_path_factory.mktemp("service")) as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        described = client.lake_catalog()
        catalog = load_catalog(described.name, **described.properties)
        assert isinstance(catalog, SqlCatalog)
        found = []
        for case in CASES:
            client.create_table(
                case.name,
                SCHEMA,
                primary_key=["id"] if case.has_key else [],
                bucket_count=2,
                partitioned_by=case.partitioned_by,
                properties={**case.properties, **request.param.properties},
            )
            found.append(History(client, catalog, case, request.param))
            found[-1].live()
        yield found
        catalog.close()


def _states(histories: list[History]) -> list[tuple[History, State, LakeRole, str]]:
    return [
        (history, state, role, location)
        for history in histories
        for state in history.states
        for role, location in state.locations.items()
    ]


def test_the_lives_have_what_is_hard(histories: list[History]) -> None:
    """Deleted rows in each batch layout, files that maintenance made fewer, the format version."""
    for history in histories:
        files = [_file_counts(state) for state in history.states]
        assert any(deletes for _, deletes in files) == history.case.has_key, history.case
        assert files[-1][0] < files[-2][0], history.case
        for location in history.states[-1].locations.values():
            table = StaticTable.from_metadata(location)
            assert table.format_version == history.version.at_the_end, history.case


def _file_counts(state: State) -> tuple[int, int]:
    """Data files and delete files of the batch layout."""
    table = StaticTable.from_metadata(state.locations[LakeRole.BATCH])
    contents = table.inspect.files()["content"].to_pylist()
    return contents.count(0), contents.count(1)


def test_stock_pyiceberg_reads_what_a_dict_holds(histories: list[History]) -> None:
    for _, state, role, location in _states(histories):
        table = StaticTable.from_metadata(location)
        found = table.scan().to_arrow()
        if role is LakeRole.CHANGES:
            found = found.sort_by([("id", "ascending"), ("__offset", "ascending")])
        else:
            found = found.sort_by("id")
        names = list(state.expected[role][0])
        assert plain(found.select(names).to_pylist()) == state.expected[role], (state.what, role)


def test_duckdb_reads_what_a_dict_holds(histories: list[History]) -> None:
    with connect() as connection:
        for history, state, role, location in _states(histories):
            scan = f"iceberg_scan('{location.removeprefix('file://')}')"
            query = QUERIES[role].replace("lake_table", scan)
            found = connection.execute(query).to_arrow_table().to_pylist()
            assert plain(found) == state.expected[role], (state.what, role)
            if role is LakeRole.BATCH and state is history.states[-1]:
                for where, ids in history.found_by_filter().items():
                    rows = connection.execute(f"SELECT id FROM {scan} WHERE {where} ORDER BY id")
                    assert [row[0] for row in rows.fetchall()] == ids, (state.what, where)


@pytest.mark.judge
def test_iceberg_java_reads_what_a_dict_holds(histories: list[History]) -> None:
    # A second or more a query: a state with deletes in it, and the last.
    chosen = [
        (history, state, role, location)
        for history, state, role, location in _states(histories)
        if state in (history.states[4], history.states[-1])
    ]
    requests = [(location, QUERIES[role]) for *_, role, location in chosen]
    for history in histories:
        location = history.states[-1].locations[LakeRole.BATCH]
        requests += [(location, _by_filter(where)) for where in FILTERS]

    answers = iter(read_many_with_spark35(requests))

    for _, state, role, _ in chosen:
        assert plain(next(answers)) == state.expected[role], (state.what, role)
    for history in histories:
        for where, ids in history.found_by_filter().items():
            assert [found["id"] for found in next(answers)] == ids, (history.case, where)


def _by_filter(where: str) -> str:
    return f"SELECT id FROM lake_table WHERE {where} ORDER BY id"
