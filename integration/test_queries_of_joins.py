"""`client.query` joins as DuckDB does over the same rows: TPC-DS's kind of joins, in little memory.

Many small tables around some larger ones, several times each: without knowing how many rows a table
has, DuckDB joins in an order in which what lies between is a thousand times larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import TableNotFoundError
from tests.support.held_step import around
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = [pytest.mark.slow, pytest.mark.end_to_end]

DAYS, ITEMS, CUSTOMERS, SALES, PEOPLE = 20_000, 400, 3_000, 30_000, 38_000


def _tables() -> dict[str, pa.Table]:
    pick = np.random.default_rng(29)

    def some(below: int, count: int) -> pa.Array:
        return pa.array(pick.integers(0, below, count), pa.int64())

    def keys(count: int) -> pa.Array:
        return pa.array(np.arange(count), pa.int64())

    return {
        "days": pa.table(
            {
                "day": keys(DAYS),
                "week": pa.array(np.arange(DAYS) // 7, pa.int64()),
                "year": pa.array(1950 + np.arange(DAYS) // 365, pa.int64()),
            }
        ),
        "items": pa.table({"item": keys(ITEMS), "color": some(40, ITEMS)}),
        "homes": pa.table({"home": keys(1_000), "city": some(90, 1_000)}),
        "incomes": pa.table({"band": keys(20), "low": some(9, 20)}),
        "households": pa.table({"household": keys(2_000), "band": some(20, 2_000)}),
        "customers": pa.table(
            {
                "customer": keys(CUSTOMERS),
                "home": some(1_000, CUSTOMERS),
                "household": some(2_000, CUSTOMERS),
                "since": some(DAYS, CUSTOMERS),
            }
        ),
        "sales": pa.table(
            {
                "ticket": keys(SALES),
                "item": some(ITEMS, SALES),
                "customer": some(CUSTOMERS, SALES),
                "home": some(1_000, SALES),
                "household": some(2_000, SALES),
                "day": some(DAYS, SALES),
                "price": some(1_000, SALES),
            }
        ),
        "people": pa.table(
            {"person": keys(PEOPLE), "status": some(5, PEOPLE), "school": some(7, PEOPLE)}
        ),
        "returns": pa.table(
            {
                "ticket": some(SALES, 3_000),
                "item": some(ITEMS, 3_000),
                "payer": some(PEOPLE, 3_000),
                "sender": some(PEOPLE, 3_000),
            }
        ),
        "stock": pa.table({"item": some(ITEMS, 40_000), "day": some(DAYS, 40_000)}),
    }


# Of the kinds of TPC-DS 64, 72 and 85.
QUERIES = [
    """WITH pairs AS (
         SELECT i.item, h1.city AS there, h2.city AS here, d1.year AS sold, d2.year AS first,
                count(*) AS n, sum(s.price) AS price
         FROM sales s, returns r, days d1, days d2, days d3, customers c, households f1,
              households f2, incomes b1, incomes b2, homes h1, homes h2, items i
         WHERE s.day = d1.day AND c.since = d2.day AND d3.week = d2.week AND d3.day = d2.day
           AND s.customer = c.customer AND s.household = f1.household AND s.home = h1.home
           AND c.household = f2.household AND c.home = h2.home AND s.item = i.item
           AND s.ticket = r.ticket AND f1.band = b1.band AND f2.band = b2.band AND i.color < 30
         GROUP BY ALL)
       SELECT a.item, a.there, b.here, a.sold, b.sold AS later, a.n + b.n AS n
       FROM pairs a, pairs b WHERE a.item = b.item AND a.sold + 1 = b.sold AND a.n <= b.n""",
    """SELECT i.color, d1.week, count(*) AS n, count(r.ticket) AS returned
       FROM sales s JOIN stock k ON s.item = k.item JOIN items i ON i.item = s.item
         JOIN customers c ON s.customer = c.customer JOIN households f ON f.household = c.household
         JOIN days d1 ON s.day = d1.day JOIN days d2 ON k.day = d2.day
         JOIN days d3 ON c.since = d3.day LEFT JOIN returns r ON r.ticket = s.ticket
       WHERE d1.week = d2.week AND d3.year > 1960 AND f.band < 15
       GROUP BY ALL""",
    """SELECT h.city, avg(s.price) AS price, max(r.item) AS item
       FROM sales s, returns r, people p1, people p2, homes h, days d
       WHERE s.ticket = r.ticket AND s.day = d.day AND d.year BETWEEN 1960 AND 1990
         AND p1.person = r.payer AND p2.person = r.sender AND h.home = s.home
         AND (p1.status = 1 AND p1.status = p2.status AND p1.school = 2 AND p1.school = p2.school
           OR p1.status = 2 AND p1.status = p2.status AND p1.school < 5 AND p1.school = p2.school
           OR p1.status = 3 AND p1.status = p2.status AND p1.school > 3 AND p1.school = p2.school)
       GROUP BY ALL""",
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamhouseClient]:
    """A service with the tables: the first half of each in the lake, the second in the log."""
    folder: Path = tmp_path_factory.mktemp("joins")
    with ServiceProcess(folder / "data") as service, StreamhouseClient(service.endpoint) as made:
        for name, rows in _tables().items():
            half = rows.num_rows // 2
            made.create_table(f"default.{name}", rows.schema)
            made.append(f"default.{name}", rows.slice(0, half))
            tier_once(made, f"default.{name}")
            made.append(f"default.{name}", rows.slice(half))
        yield made


@pytest.mark.parametrize("query", QUERIES, ids=["pairs", "stock", "people"])
def test_joins_of_many_tables_find_what_duckdb_finds_in_little_memory(
    client: StreamhouseClient, query: str
) -> None:
    with duckdb.connect() as alone:
        for name, rows in _tables().items():
            alone.register(name, rows)
        expected = alone.execute(query).to_arrow_table()

    found = client.query(query, memory_limit="200MB")

    order = [(name, "ascending") for name in expected.schema.names]
    assert found.sort_by(order).to_pylist() == expected.sort_by(order).to_pylist()
    assert found.num_rows > 10


@pytest.mark.parametrize("primary_key", [(), ("id",)], ids=["log", "keys"])
def test_a_table_that_is_kept_is_never_stale(
    tmp_path: Path, primary_key: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each change, tiered or not yet, a join finds what a read finds, which keeps nothing."""
    reads: list[object] = []

    def read(real: Callable[..., Iterator[pa.RecordBatch]], *part: object) -> object:
        reads.append(part)
        return real(*part)

    around(monkeypatch, "small-table-read", read)
    with (
        ServiceProcess(tmp_path / "data") as service,
        StreamhouseClient(service.endpoint) as client,
        StreamhouseClient(service.endpoint) as other,
    ):

        def rows(**columns: list[object]) -> pa.Table:
            types = {"id": pa.int64(), "value": pa.string(), "more": pa.int64()}
            return pa.table({n: pa.array(v, types[n]) for n, v in columns.items()})

        def make() -> None:
            schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("value", pa.string())])
            other.create_table("default.t", schema, primary_key=primary_key)

        def write(values: pa.Table) -> None:
            (other.upsert if primary_key else other.append)("default.t", values)

        def check(*, is_kept: bool = False) -> list[dict[str, object]]:
            expected = client.read("default.t").to_pylist()
            for _ in range(2):
                reads.clear()
                rows = client.query("SELECT a.* FROM t a LEFT JOIN t b ON a.id = b.id AND b.id < 0")
                assert sorted(map(repr, rows.to_pylist())) == sorted(map(repr, expected))
            assert not (is_kept and reads)
            return list(expected)

        def both(count: int) -> None:
            assert len(check()) == count
            tier_once(other, "default.t")
            assert len(check(is_kept=True)) == count

        make()
        write(rows(id=[1, 2], value=["a", "b"]))
        both(2)
        write(rows(id=[3], value=["c"]))
        both(3)
        if primary_key:
            write(rows(id=[1], value=["z"]))
            both(3)
            other.delete("default.t", rows(id=[2]))
            both(2)
        other.add_column("default.t", "more", pa.int64())
        check()
        write(rows(id=[4], value=["d"], more=[7]))
        both(3 if primary_key else 4)
        other.drop_column("default.t", "value", confirm="value")
        check()
        if not primary_key:
            # Another engine may delete rows of the lake.
            lake = other.lake_catalog()
            load_catalog(lake.name, **lake.properties).load_table("default.t").delete("id = 3")
            assert len(check(is_kept=True)) == 3
        other.drop_table("default.t")
        with pytest.raises(TableNotFoundError):
            client.query("SELECT a.* FROM t a JOIN t b USING (id)")
        make()
        assert check() == []
        write(rows(id=[1, 2], value=["x", "y"]))
        both(2)
