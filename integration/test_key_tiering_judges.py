"""Lake tables of primary key tables judged by stock pyiceberg, DuckDB and Iceberg Java.

Each table goes through rounds of upserts, deletes, reinserts, moves between lake partitions and
idle buckets; before and after each, live and in the lake, every judge must find the rows of a dict.
Every type, nulls, simple and composite keys, both changelog images; in Iceberg's format version 2
and 3, and in tables that go from 2 to 3 between rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import StaticTable

from integration.judges.duckdb_read import connect
from integration.judges.engines import read_many_with_spark35
from integration.judges.every_type import SCHEMA, plain, row
from integration.judges.format_versions import EVERY, FormatVersion
from streamhouse.client import StorageClient
from tests.support.live_tables import live_catalog
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KEYED = pa.schema([*SCHEMA, pa.field("kind", pa.string(), nullable=False)])
ALL = f"SELECT {', '.join(KEYED.names)} FROM lake_table ORDER BY id, kind"
COUNT = 40


@dataclass(frozen=True)
class Case:
    """A primary key table."""

    name: str
    primary_key: tuple[str, ...] = ("id",)
    bucket_key: tuple[str, ...] = ()
    partitioned_by: tuple[str, ...] = ()
    image: str = "full"


CASES = [
    Case("plain"),
    Case("after_image", image="after"),
    Case("moves", partitioned_by=("name",)),
    Case("days", partitioned_by=("day(ts)", "flag"), image="after"),
    Case("composite", primary_key=("kind", "id"), partitioned_by=("bucket(2, price)",)),
    Case("part_of_key", primary_key=("id", "kind"), bucket_key=("kind",)),
    Case("truncated", primary_key=("id", "kind"), partitioned_by=("truncate(1, name)",)),
]


def _row(number: int, version: int) -> dict[str, Any]:
    """Row `number` with values that differ by version: partition values move."""
    return row(number * 7 + version * 5) | {"id": number, "kind": f"k{number % 3}"}


@dataclass
class State:
    """A table: where its metadata is, and the rows it must have."""

    location: str
    rows: list[dict[str, Any]]


@dataclass
class History:
    """A table, the dict it must equal, its states after rounds, and its live ones before them."""

    client: StorageClient
    catalog: SqlCatalog
    case: Case
    version: FormatVersion
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    states: list[State] = field(default_factory=list)
    live_states: list[State] = field(default_factory=list)

    def upsert(self, numbers: Sequence[int], version: int) -> None:
        rows = [_row(number, version) for number in numbers]
        self.client.upsert(self.case.name, pa.Table.from_pylist(rows, schema=KEYED))
        self.rows |= {r["id"]: r for r in rows}

    def delete(self, numbers: Sequence[int]) -> None:
        key = pa.schema([KEYED.field(name) for name in self.case.primary_key])
        keys = [{name: _row(number, 0)[name] for name in key.names} for number in numbers]
        self.client.delete(self.case.name, pa.Table.from_pylist(keys, schema=key))
        for number in numbers:
            self.rows.pop(number, None)

    def tier(self) -> None:
        self.live_states.append(self._state(live_catalog(self.client.endpoint)))
        tier_once(self.client, self.case.name)
        self.states.append(self._state(self.catalog))

    def _state(self, catalog: Catalog) -> State:
        location = catalog.load_table(("default", self.case.name)).metadata_location
        return State(location, plain([self.rows[number] for number in sorted(self.rows)]))

    def live(self) -> None:
        """Play the table's life."""
        self.upsert(range(COUNT), 0)
        self.upsert(range(0, COUNT, 5), 1)
        self.tier()
        self.upsert(range(0, COUNT, 3), 2)
        self.delete(range(0, COUNT, 7))
        self.tier()
        if upgrade := self.version.upgrade:
            self.client.alter_properties(self.case.name, updates=upgrade)
        # Reinserts, and a row that comes and goes within the round.
        self.upsert([0, 7, COUNT], 3)
        self.upsert([COUNT + 1], 3)
        self.delete([COUNT + 1, 14])
        self.tier()
        # All buckets but one idle.
        self.upsert([3], 4)
        self.tier()
        self.upsert([COUNT + 2], 4)
        self.delete([COUNT + 2])
        self.tier()
        self.delete(range(COUNT // 2))
        self.tier()


@pytest.fixture(scope="module", params=EVERY, ids=str)
def histories(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[str, History]]:
    with (
        ServiceProcess(tmp_path_factory.mktemp("service")) as service,
        StorageClient(service.endpoint) as client,
    ):
        described = client.lake_catalog()
        catalog = load_catalog(described.name, **described.properties)
        assert isinstance(catalog, SqlCatalog)
        found = {}
        for case in CASES:
            client.create_table(
                case.name,
                KEYED,
                primary_key=case.primary_key,
                bucket_key=case.bucket_key,
                bucket_count=3,
                partitioned_by=case.partitioned_by,
                # Maintenance would add snapshots of its own: here each is a round's.
                properties={
                    "table.changelog.image": case.image,
                    "table.datalake.auto-maintenance": "false",
                    **request.param.properties,
                },
            )
            found[case.name] = History(client, catalog, case, request.param)
            found[case.name].live()
        yield found
        catalog.close()


NAMES = [case.name for case in CASES]


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", NAMES)
def test_stock_pyiceberg_reads_what_a_dict_holds(histories: dict[str, History], name: str) -> None:
    history = histories[name]
    table = history.catalog.load_table(("default", name))
    snapshots = sorted(table.snapshots(), key=lambda s: s.sequence_number or 0)

    # One snapshot a round, and old ones stay as they were.
    assert len(snapshots) == len(history.states)
    for snapshot, state in zip(snapshots, history.states, strict=True):
        scan = table.scan(snapshot_id=snapshot.snapshot_id, selected_fields=tuple(KEYED.names))
        rows = sorted(scan.to_arrow().to_pylist(), key=lambda r: (r["id"], r["kind"]))
        assert plain(rows) == state.rows
    for state in history.live_states:
        scan = StaticTable.from_metadata(state.location).scan(selected_fields=tuple(KEYED.names))
        rows = sorted(scan.to_arrow().to_pylist(), key=lambda r: (r["id"], r["kind"]))
        assert plain(rows) == state.rows


@pytest.mark.end_to_end
def test_duckdb_reads_what_a_dict_holds(histories: dict[str, History]) -> None:
    with connect() as connection:
        for history in histories.values():
            for state in (*history.states, *history.live_states):
                scan = f"iceberg_scan('{state.location.removeprefix('file://')}')"
                found = (
                    connection.execute(ALL.replace("lake_table", scan)).to_arrow_table().to_pylist()
                )
                assert plain(found) == state.rows, history.case


@pytest.mark.judge
def test_iceberg_java_reads_what_a_dict_holds(histories: dict[str, History]) -> None:
    # A second or more a query: those with everything in them, and the last.
    states = [
        state for h in histories.values() for of in (h.states, h.live_states) for state in of[2::3]
    ]

    answers = read_many_with_spark35([(state.location, ALL) for state in states])

    for state, rows in zip(states, answers, strict=True):
        assert plain(rows) == state.rows
