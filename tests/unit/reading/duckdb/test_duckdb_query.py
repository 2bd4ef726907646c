"""DuckDB's SQL over a table's two tiers: what it finds, what it reads, and what it says."""

from __future__ import annotations

import contextvars
import datetime as dt
import functools
import math
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from streamhouse import StreamhouseClient
from streamhouse.client import STOP, StopSignal, StorageClient
from streamhouse.core.errors import (
    InvalidRequestError,
    StreamhouseError,
    TableNotFoundError,
    UnavailableError,
)
from streamhouse.core.extras import MissingExtraError
from streamhouse.reading.duckdb import _query_database as query_database
from streamhouse.reading.duckdb.duckdb_query import (
    MEMORY_LIMIT,
    _check_told_apart,
    query_tables,
)
from tests.support.held_step import lower
from tests.support.union_world import UnionWorld

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("region", pa.string()),
        pa.field("share", pa.float32()),
        pa.field("day", pa.date32()),
        pa.field("ts", pa.timestamp("us", "UTC")),
        pa.field("place", pa.struct([pa.field("zone", pa.int32())])),
        pa.field("price", pa.decimal128(10, 2)),
    ]
)
COUNT = 40
REGIONS = (None, "e'u", "us", 'a"\\b')
SHARES = (float("nan"), 0.25, -0.0, None)
Row = dict[str, Any]


def _row(i: int) -> Row:
    day = dt.datetime(2024, 1, 1 + i % 28, tzinfo=dt.UTC)
    return {
        "id": i,
        "region": REGIONS[i % 4],
        "share": SHARES[i // 4 % 4],
        "day": day.date(),
        "ts": day,
        "place": {"zone": i % 7},
        "price": i,
    }


ROWS = [_row(i) for i in range(COUNT)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnionWorld]:
    """A table of which a part is in the lake."""
    with UnionWorld(Path(tmp_path_factory.mktemp("query"))) as world:
        world.tiering.create_table(UnionWorld.PATH, SCHEMA, bucket_count=2)
        rows = pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA)
        world.append(0, rows.slice(0, 15))
        world.append(1, rows.slice(15, 10))
        world.tiering.tier()
        world.append(0, rows.slice(25))
        yield world


def _query(
    world: UnionWorld,
    statement: str,
    args: Any = None,
    *,
    memory_limit: str = MEMORY_LIMIT,
    **options: object,
) -> pa.Table:
    return query_tables(world.client, statement, args, options, memory_limit=memory_limit)


def _ids(table: pa.Table) -> list[int]:
    return sorted(table.column("id").to_pylist())


def _share(row: Row) -> float | None:
    # NaN is above all numbers.
    share = row["share"]
    return math.inf if share is not None and math.isnan(share) else share


CONDITIONS: dict[str, Callable[[Row], bool]] = {
    "id > 5 AND region = 'e''u'": lambda r: r["id"] > 5 and r["region"] == "e'u",
    "id IN (1, 20, 3000)": lambda r: r["id"] in (1, 20),
    "region IN ('us', 'e''u')": lambda r: r["region"] in ("us", "e'u"),
    "region <> 'a\"\\b'": lambda r: r["region"] not in (None, 'a"\\b'),
    "region IS NULL": lambda r: r["region"] is None,
    "region LIKE 'e%'": lambda r: r["region"] == "e'u",
    "share > 0.2": lambda r: (_share(r) or 0) > 0.2,
    "share = 'nan'::FLOAT": lambda r: _share(r) == math.inf,
    "NOT share > 0.2": lambda r: r["share"] == 0,
    "share = 0": lambda r: r["share"] == 0,
    "day >= '2024-01-09'": lambda r: r["day"] >= dt.date(2024, 1, 9),
    "ts > '2024-01-09'": lambda r: r["ts"] > dt.datetime(2024, 1, 9, tzinfo=dt.UTC),
    "ts < TIMESTAMPTZ '2024-01-09 02:00:00+02'": lambda r: r["day"] < dt.date(2024, 1, 9),
    "place.zone > 3 AND id < 20": lambda r: r["place"]["zone"] > 3 and r["id"] < 20,
    "price = 7.00": lambda r: r["price"] == 7,
    "id % 3 = 1 OR id = 9": lambda r: r["id"] % 3 == 1 or r["id"] == 9,
    "id < 3 OR (id = 30 AND region = 'us')": lambda r: (
        r["id"] < 3 or (r["id"] == 30 and r["region"] == "us")
    ),
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_query_finds_what_its_condition_is_true_for(world: UnionWorld, condition: str) -> None:
    expected = [row["id"] for row in ROWS if CONDITIONS[condition](row)]

    assert _ids(_query(world, f"SELECT id FROM db.t WHERE {condition}")) == expected
    assert (_query(world, f"SELECT count(*) AS n FROM db.t WHERE {condition}").to_pylist()) == [
        {"n": len(expected)}
    ]


@pytest.mark.parametrize("small_bytes", [1 << 20, 0])
@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("SELECT count(*) AS n FROM db.t", [{"n": COUNT}]),
        ("FROM db.t SELECT max(id) AS n", [{"n": COUNT - 1}]),
        ('SELECT count(*) AS n FROM "db"."t$lake"', [{"n": 25}]),
        ('SELECT count(*) AS n FROM db."t$buckets"', [{"n": 2}]),
        ("SELECT count(*) AS n FROM db.t a JOIN db.t b USING (id)", [{"n": COUNT}]),
        (
            "WITH few AS (SELECT * FROM db.t WHERE id < 3) SELECT sum(few.id) AS n FROM few"
            " JOIN db.t AS other ON other.id = few.id + 1",
            [{"n": 3}],
        ),
        ("SELECT id FROM db.t WHERE id IN (SELECT 3 UNION SELECT 99)", [{"id": 3}]),
        ("SELECT db.t.id FROM db.t ORDER BY id LIMIT 1", [{"id": 0}]),
        ("SELECT count(*) AS n FROM (SELECT * FROM db.t LIMIT 7)", [{"n": 7}]),
        ("SELECT 1 AS n", [{"n": 1}]),
    ],
)
def test_all_kinds_of_statements_are_answered(
    world: UnionWorld,
    statement: str,
    expected: list[Row],
    small_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lower(monkeypatch, "small-table", small_bytes)

    assert _query(world, statement).to_pylist() == expected


def test_the_default_database_need_not_be_named(world: UnionWorld) -> None:
    world.tiering.create_table("default.plain", SCHEMA, bucket_count=1)
    world.tiering.service.append(
        "default.plain", 0, pa.RecordBatch.from_pylist(ROWS[:3], schema=SCHEMA)
    )
    for name in ("plain", '"default".plain', '"plain$log"'):
        assert _query(world, f"SELECT count(*) AS n FROM {name}").to_pylist() == [{"n": 3}]
    # A CTE of the name goes first.
    found = _query(world, "WITH plain AS (SELECT 7 AS n) SELECT n FROM plain")
    assert found.to_pylist() == [{"n": 7}]


def test_values_and_options_are_taken(world: UnionWorld) -> None:
    by_place = _query(world, "SELECT id FROM db.t WHERE id = ?", [3])
    by_name = _query(world, "SELECT id FROM db.t WHERE id = $id", {"id": 4})
    addressed = _query(
        world, "SELECT id FROM db.t WHERE __bucket = 1 AND __offset = 2", includeMetadata=True
    )
    zoned = _query(
        world, "SELECT id FROM db.t WHERE ts < '2024-01-02 01:00'", timeZone="Europe/Berlin"
    )
    assert [_ids(found) for found in (by_place, by_name, addressed)] == [[3], [4], [17]]
    assert _ids(zoned) == [0, 28]


class _Service:
    """A world's service, but for its logs: they say what is read of them, or have lost it."""

    def __init__(self, world: UnionWorld, lost: StreamhouseError | None = None) -> None:
        self.columns: list[tuple[str, ...]] = []
        self._service = world.client
        self._lost = lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    def read_range(self, *place: Any, columns: Sequence[str], **options: Any) -> Any:
        if self._lost is not None:
            raise self._lost
        self.columns.append(tuple(columns))
        return self._service.read_range(*place, columns=columns, **options)


def test_only_what_is_needed_is_read(world: UnionWorld) -> None:
    service = _Service(world)

    statement = "WITH c AS (SELECT * FROM db.t) SELECT sum(price) FROM c WHERE id > 7"
    query_tables(cast(StorageClient, service), statement, None, {})

    assert {frozenset(names) for names in service.columns} == {frozenset({"price", "id"})}


@pytest.mark.parametrize(
    ("statement", "error", "message"),
    [
        ("SELECT * FROM db.u", TableNotFoundError, "table 'db.u' does not exist"),
        ("SELEC 1", InvalidRequestError, 'query: syntax error at or near "SELEC"'),
        ("SELECT 1; SELECT 2", InvalidRequestError, "one SELECT is expected, not 2 statements"),
        ("DROP TABLE db.t", InvalidRequestError, "query: one SELECT is expected"),
        ("SELECT nope FROM db.t", InvalidRequestError, 'column "nope" not found'),
        ("SELECT * FROM t", TableNotFoundError, "table 'default.t' does not exist"),
        ("WITH c AS (SELECT 1) SELECT * FROM c, db.u", TableNotFoundError, "'db.u' does not exist"),
        ("SELECT 1 WHERE ? = 1", InvalidRequestError, "query: "),
    ],
)
def test_a_query_that_fails_says_why_in_a_sentence(
    world: UnionWorld, statement: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        _query(world, statement)
    assert "\n" not in str(raised.value)


def test_of_a_small_table_in_a_join_only_what_is_named_is_read(world: UnionWorld) -> None:
    service = _Service(world)

    statement = "SELECT sum(a.price) FROM db.t a JOIN db.t AS b USING (id)"
    query_tables(cast(StorageClient, service), statement, None, {})

    assert {frozenset(names) for names in service.columns} == {frozenset({"price", "id"})}


def test_a_join_of_a_large_table_takes_filters_of_the_other_side(
    world: UnionWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DuckDB 1.5 would hand the dataset a Bloom filter, for which it has no words."""
    lower(monkeypatch, "small-table", 0)
    large = "(SELECT DISTINCT i % 20 AS id FROM range(200000) r(i))"

    found = _query(world, f"SELECT t.id FROM db.t JOIN {large} AS other ON other.id = t.id")

    assert _ids(found) == list(range(20))


def test_what_does_not_fit_into_memory_goes_to_files_that_are_gone_afterwards(
    world: UnionWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    statement = "SELECT count(*) AS n FROM (SELECT DISTINCT i, i || 'text' FROM range(600000) r(i))"

    assert _query(world, statement, memory_limit="24MB").to_pylist() == [{"n": 600_000}]
    assert not list(tmp_path.iterdir())
    with pytest.raises(InvalidRequestError, match=r"memory_limit is 'much', but must be as in '2G"):
        _query(world, "SELECT 1", memory_limit="much")
    with pytest.raises(UnavailableError, match="it needs more memory than 'memory_limit'"):
        _query(world, "SELECT list(i || 'text') FROM range(900000) r(i)", memory_limit="9MB")


ENDLESS = (
    "SELECT count(*) FROM db.t a JOIN db.t b ON true, range(1000000) c(i), range(1000000) d(j)"
)


class _Interrupting(_Service):
    """A service that does something when its rows are asked for."""

    def __init__(self, world: UnionWorld, act: Callable[[], None]) -> None:
        super().__init__(world)
        self._act = act

    def read_range(self, *place: Any, columns: Sequence[str], **options: Any) -> Any:
        self._act()
        return super().read_range(*place, columns=columns, **options)


def test_an_interrupt_ends_a_query(world: UnionWorld) -> None:
    service = _Interrupting(world, functools.partial(os.kill, os.getpid(), signal.SIGINT))
    # A shell has what runs in the background ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            query_tables(cast(StorageClient, service), ENDLESS, None, {})
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_stop_signal_of_the_context_ends_a_query(world: UnionWorld) -> None:
    """So a query of the async client ends that nobody awaits any more."""
    stop = StopSignal()
    service = _Interrupting(world, stop.set)
    context = contextvars.copy_context()
    context.run(STOP.set, stop)

    with pytest.raises(UnavailableError, match="broken off"):
        context.run(query_tables, cast(StorageClient, service), ENDLESS, None, {})


def test_show_tells_whose_tables(world: UnionWorld) -> None:
    for statement in ("SHOW TABLES", "show all tables"):
        with pytest.raises(InvalidRequestError, match=r"client\.list_tables"):
            _query(world, statement)


def test_options_of_tables_are_refused(world: UnionWorld) -> None:
    with pytest.raises(InvalidRequestError, match="option 'where' is said by the statement"):
        _query(world, "SELECT 1", where="id > 3")


def test_an_error_while_rows_are_read_is_ours(world: UnionWorld) -> None:
    service = _Service(world, lost=UnavailableError("the service does not answer"))
    with pytest.raises(UnavailableError, match="does not answer"):
        query_tables(cast(StorageClient, service), "SELECT * FROM db.t", None, {})


def test_without_duckdb_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    monkeypatch.delitem(sys.modules, "streamhouse.reading.duckdb.duckdb_query", raising=False)
    with (
        StreamhouseClient("http://127.0.0.1:9") as client,
        pytest.raises(MissingExtraError, match=r"pyspark-streamhouse\[sql\]"),
    ):
        client.query("SELECT 1")


def test_a_forked_process_has_a_database_of_its_own(world: UnionWorld) -> None:
    """DuckDB's threads are not in it."""
    statement = 'SELECT count(*) AS n FROM db."t$lake" a JOIN db."t$lake" b USING (id)'
    assert _query(world, statement).to_pylist() == [{"n": 25}]

    if (child := os.fork()) == 0:
        os._exit(0 if _query(world, statement).to_pylist() == [{"n": 25}] else 1)

    assert os.waitpid(child, 0)[1] == 0
    assert _query(world, statement).to_pylist() == [{"n": 25}]


def test_what_is_kept_is_bounded(world: UnionWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    statement = 'SELECT count(*) AS n FROM db."t$lake" a JOIN db."t$lake" b USING (id)'
    _query(world, statement)
    assert query_database._idle[0]._tables
    lower(monkeypatch, "kept-tables", 0)

    assert _query(world, statement).to_pylist() == [{"n": 25}]
    assert not query_database._idle[0]._tables


def test_tables_of_earlier_builds_that_differ_in_case_alone_are_not_mixed_up() -> None:
    with pytest.raises(InvalidRequestError, match=r"'db\.t' and 'db\.T' differ in case alone"):
        _check_told_apart([("db", "t"), ("db", "u"), ("db", "T")])
