"""Random SQL over three small tables, for comparing two ways to read them.

Statements are valid and have one answer: no LIMIT, no sums of doubles, windows ordered by a key.
`{a}`, `{b}` and `{c}` stand for the tables; all have the columns of ROWS.
"""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Final

import pyarrow as pa
from hypothesis import strategies as st

__all__ = ["SCHEMA", "rows", "statements"]

SCHEMA: Final = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("k", pa.int32()),
        pa.field("word", pa.string()),
        pa.field("ratio", pa.float64()),
        pa.field("price", pa.decimal128(10, 2)),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("flag", pa.bool_()),
        pa.field("place", pa.struct([("zone", pa.int32()), ("name", pa.string())])),
    ]
)
_WORDS: Final = ("", "eu", "us", "it's", "a\\b", "é%", None)


def rows(start: int, end: int) -> pa.Table:
    """Return rows with ids [start, end); each column but the key has nulls."""
    ids = range(start, end)
    day = datetime.date(2026, 1, 1)
    at = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    some = [i % 5 != 3 for i in ids]
    return pa.table(
        {
            "id": list(ids),
            "k": [i % 4 if ok else None for i, ok in zip(ids, some, strict=True)],
            "word": [_WORDS[i % len(_WORDS)] for i in ids],
            "ratio": [(float("nan"), 0.5, -0.0, None)[i % 4] for i in ids],
            "price": [Decimal(i % 9) / 4 if i % 7 else None for i in ids],
            "day": [day + datetime.timedelta(i % 6) if i % 6 else None for i in ids],
            "at": [at + datetime.timedelta(hours=i) if i % 8 else None for i in ids],
            "flag": [(True, False, None)[i % 3] for i in ids],
            "place": [{"zone": i % 3, "name": f"n{i % 4}"} if i % 10 else None for i in ids],
        },
        schema=SCHEMA,
    )


_TESTS: Final = (
    "{t}.id > 7",
    "{t}.id BETWEEN 3 AND 12",
    "{t}.k = 2",
    "{t}.k <=> NULL",
    "{t}.k IN (1, 3, NULL)",
    "{t}.k IS NULL",
    "{t}.k + 1 = 3",
    "{t}.id < {t}.k * 5",
    "{t}.word = 'eu'",
    "{t}.word = 'it\\'s'",
    "{t}.word LIKE 'a%'",
    "{t}.word > 'b'",
    "{t}.word IS NOT NULL",
    "coalesce({t}.word, 'us') = 'us'",
    "{t}.ratio = 0",
    "{t}.ratio > 0.1",
    "isnan({t}.ratio)",
    "{t}.price >= 1.25",
    "{t}.price = 0.5D",
    "{t}.price < {t}.k",
    "{t}.day > DATE '2026-01-03'",
    "{t}.day < DATE '2026-02-01' - INTERVAL '28' DAY",
    "{t}.at >= '2026-01-01 12:00:00'",
    "date({t}.at) = DATE '2026-01-01'",
    "{t}.day <= {t}.at",
    "{t}.flag",
    "{t}.flag IS NOT TRUE",
    "{t}.place.zone = 1",
    "{t}.place IS NULL",
    "CASE WHEN {t}.flag THEN {t}.k ELSE {t}.id END = 2",
)
_JOINS: Final = ("JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN", "LEFT SEMI JOIN", "LEFT ANTI JOIN")
_EQUALITIES: Final = ("{x}.id = {y}.id", "{x}.k = {y}.k", "{x}.word <=> {y}.word", "{x}.id = {y}.k")
_VALUES: Final = ("{t}.id", "{t}.k", "{t}.word", "{t}.price", "{t}.place.name", "{t}.day")
_AGGREGATES: Final = (
    "count(*)",
    "count({t}.k)",
    "sum({t}.id)",
    "min({t}.word)",
    "max({t}.at)",
    "count(DISTINCT {t}.word)",
    "sum({t}.price) FILTER (WHERE {t}.flag)",
)
_tables = st.sampled_from(["{a}", "{b}", "{c}"])


@st.composite
def _conditions(draw: st.DrawFn, alias: str, depth: int = 2) -> str:
    kind = draw(st.sampled_from(["test", "test", "and", "or", "not", "subquery"]))
    if kind == "subquery" and depth == 2:
        return draw(_subqueries(alias))
    if depth and kind in ("and", "or"):
        sides = (draw(_conditions(alias, depth - 1)), draw(_conditions(alias, depth - 1)))
        return f"({sides[0]} {kind.upper()} {sides[1]})"
    if depth and kind == "not":
        return f"NOT {draw(_conditions(alias, depth - 1))}"
    return "(" + draw(st.sampled_from(_TESTS)).replace("{t}", alias) + ")"


@st.composite
def _subqueries(draw: st.DrawFn, alias: str) -> str:
    table, inner = draw(_tables), draw(_conditions("q", 1))
    return draw(
        st.sampled_from(
            [
                f"{alias}.k IN (SELECT k FROM {table} q WHERE {inner})",
                f"{alias}.k NOT IN (SELECT k FROM {table} q WHERE {inner} AND k IS NOT NULL)",
                f"EXISTS (SELECT * FROM {table} q WHERE q.k = {alias}.k AND {inner})",
                f"NOT EXISTS (SELECT 1 FROM {table} q WHERE q.id = {alias}.k AND {inner})",
                f"{alias}.id > (SELECT max(k) FROM {table} q WHERE {inner})",
                f"{alias}.id > (SELECT count(*) FROM {table} q WHERE q.k = {alias}.k)",
            ]
        )
    )


@st.composite
def _sources(draw: st.DrawFn) -> str:
    """What stands for a table: the table, or a subquery with all of its columns."""
    table = draw(_tables)
    other = draw(_tables)
    return draw(
        st.sampled_from(
            [
                table,
                table,
                f"(SELECT * FROM {table} q WHERE {draw(_conditions('q', 1))})",
                f"(SELECT * FROM {table} UNION ALL SELECT * FROM {other})",
                f"(SELECT * FROM {table} q WHERE q.id IN (SELECT max(id) FROM {other} GROUP BY k))",
            ]
        )
    )


@st.composite
def _selects(draw: st.DrawFn) -> str:
    x, y = draw(_sources()), draw(_sources())
    joined = draw(st.sampled_from([None, None, *_JOINS]))
    where = draw(st.one_of(st.none(), _conditions("x")))
    source = f"{x} x"
    if joined is not None:
        on = draw(st.sampled_from(_EQUALITIES)).replace("{x}", "x").replace("{y}", "y")
        more = draw(st.one_of(st.none(), _conditions(draw(st.sampled_from(["x", "y"])), 1)))
        source += f" {joined} {y} y ON {on}" + ("" if more is None else f" AND {more}")
    seen = "x" if joined is None or "SEMI" in joined or "ANTI" in joined else "y"
    values = [v.replace("{t}", draw(st.sampled_from(["x", seen]))) for v in _VALUES]
    value = draw(st.sampled_from(values))
    total = draw(st.sampled_from(_AGGREGATES)).replace("{t}", seen)
    shape = draw(st.sampled_from(["values", "all", "group", "total", "window", "distinct"]))
    columns, rest = {
        "values": (f"{value} AS v, x.id AS w", ""),
        "all": ("x.*", ""),
        "group": (f"{value} AS v, {total} AS n", f"GROUP BY {value}"),
        "total": (f"{total} AS n", ""),
        # Rows with one id tie: they have one rank.
        "window": ("x.k, rank() OVER (PARTITION BY x.k ORDER BY x.id) AS n", ""),
        "distinct": (f"DISTINCT {value} AS v", ""),
    }[shape]
    return f"SELECT {columns} FROM {source}" + (f" WHERE {where}" if where else "") + f" {rest}"


@st.composite
def statements(draw: st.DrawFn) -> str:
    """Return a statement with `{a}`, `{b}` and `{c}` for its tables."""
    kind = draw(st.sampled_from(["select", "select", "select", "cte", "set", "positional"]))
    if kind == "cte":
        table = draw(_tables)
        ctes = f"WITH q AS (SELECT * FROM {table} t WHERE {draw(_conditions('t', 1))})"
        return f"{ctes} SELECT q.word, count(*) FROM q JOIN q r ON q.k = r.k GROUP BY 1"
    if kind == "set":
        operator = draw(st.sampled_from(["UNION", "UNION ALL", "EXCEPT", "INTERSECT"]))
        sides = [f"SELECT k, word FROM ({draw(_plain_selects())})" for _ in range(2)]
        return f"{sides[0]} {operator} {sides[1]}"
    if kind == "positional":
        table, other = draw(_tables), draw(_tables)
        return (
            f"SELECT n.c3, m.word FROM {table} AS n(c1, c2, c3, c4, c5, c6, c7, c8, c9)"
            f" JOIN (SELECT * FROM {other} ORDER BY 3, 1) m ON n.c1 = m.id"
        )
    return draw(_selects())


@st.composite
def _plain_selects(draw: st.DrawFn) -> str:
    return f"SELECT * FROM {draw(_tables)} t WHERE {draw(_conditions('t', 1))}"
