"""Values of each type of PostgreSQL through `streamhouse cdc`: the snapshot and the stream say the
same of one row, and it is what PostgreSQL says, also of odd values and of those left alone.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import pytest

from integration.cdc_world import CdcWorld, world
from integration.judges.postgres_server import PostgresServer

__all__ = ["world"]

pytestmark = [pytest.mark.slow, pytest.mark.judge, pytest.mark.timeout(600)]

_ROWS: Final = 40


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    settings = ("wal_level=logical", "max_replication_slots=40", "timezone=Asia/Kolkata")
    with PostgresServer(*settings, with_driver=False) as started:
        yield started


@dataclass(frozen=True)
class Kind:
    """A type: literals of it, what PostgreSQL says of `v` as text, and what ours is as that."""

    sql: str
    literals: tuple[str, ...]
    expression: str = "v::text"
    shown: Callable[[Any], str] = str
    has_arrays: bool = True


def _moment(value: dt.datetime) -> str:
    return value.replace(tzinfo=None).isoformat(sep=" ", timespec="microseconds")


def _clipped(zone: str) -> str:
    first, last = "timestamp '0001-01-01'", "timestamp '9999-12-31 23:59:59.999999'"
    clipped = f"LEAST(GREATEST(v{zone}, {first}), {last})"
    return f"CASE WHEN v IS NOT NULL THEN to_char({clipped}, 'YYYY-MM-DD HH24:MI:SS.US') END"


_ODD_DAYS: Final = (
    *("infinity", "-infinity", "0044-03-15 BC", "4713-01-01 BC", "0001-01-01", "0001-12-31 BC"),
    *("1582-10-04", "1582-10-10", "1582-10-15", "1500-03-01", "9999-12-31", "10000-01-01"),
    *("12026-01-01", "2024-02-29"),
)
_ODD_MOMENTS: Final = (
    *_ODD_DAYS,
    *("1500-03-01 01:02:03.000004", "294276-12-30 23:59:59.999999", "2026-01-01 00:00:00.1"),
)
_KINDS: Final = {
    "int2": Kind("int2", ("-32768", "7")),
    "int4": Kind("int4", ("-2147483648", "2147483647")),
    "int8": Kind("int8", ("9223372036854775807", "0")),
    "bool": Kind("bool", ("t", "f"), shown=lambda value: str(value).lower()),
    "f8": Kind(
        "float8",
        ("NaN", "-Infinity", "4.9e-324", "1.1", "1e308"),
        "v::text",
        lambda value: str(value),
    ),
    "f4": Kind("float4", ("NaN", "Infinity", "1.1"), "v::float4::float8::text"),
    "n": Kind("numeric", ("NaN", "Infinity", "-Infinity", "1e30", "-1e-20", "1.500")),
    "n10": Kind("numeric(10,2)", ("1.5", "-99999999.99")),
    "whole": Kind("numeric(3,-2)", ("1200", "-99900", "0")),
    "small": Kind("numeric(3,5)", ("0.00123",)),
    "day": Kind(
        "date",
        _ODD_DAYS,
        "CASE WHEN v IS NOT NULL THEN"
        " LEAST(GREATEST(v, date '0001-01-01'), date '9999-12-31')::text END",
        dt.date.isoformat,
    ),
    "at": Kind("timestamp", _ODD_MOMENTS, _clipped(""), _moment),
    "at3": Kind(
        "timestamp(3)", ("infinity", "-infinity", "1500-03-01 01:02:03.123"), _clipped(""), _moment
    ),
    "instant": Kind("timestamptz", _ODD_MOMENTS, _clipped(" AT TIME ZONE 'UTC'"), _moment),
    "clock": Kind("time", ("24:00", "00:00", "23:59:59.999999", "01:02:03.5")),
    "b3": Kind("bit(3)", ("000", "101"), "length(v) || ':' || v::int4", lambda b: f"3:{b[0]}"),
    "b1": Kind("bit(1)", ("0", "1"), "v::int4::text", lambda b: str(b[0])),
    "raw": Kind("bytea", ("", r"\x00ff10"), "encode(v, 'hex')", bytes.hex),
    "word": Kind("text", ("", "NULL", 'a "b", {c}\\', "ñ€", "x;y", " ")),
    "fixed": Kind("char(3)", ("ab", ""), "v::bpchar || repeat(' ', 3 - length(v))"),
    "mood": Kind("mood", ("sad", "it's")),
    "j": Kind("jsonb", ('{"a": [1, null]}', "null", '"x"')),
    "u": Kind("uuid", ("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",)),
    "ip": Kind("inet", ("10.0.0.1/24", "::1"), "CASE WHEN v IS NOT NULL THEN format('%s', v) END"),
    "span": Kind("int4range", ("[1,5)", "empty")),
    "ident": Kind("oid", ("4294967295",)),
    "zoned": Kind("timetz", ("10:00+02", "23:59:59.5-01"), has_arrays=True),
    "money": Kind("money", ("12.34", "-0.01"), "v::numeric::text", has_arrays=False),
}
_IN_UTC: Final = "timezone('UTC', v)::time::text || 'Z'"


def _same(expected: str, ours: str) -> bool:
    if expected == ours:
        return True
    try:
        return float(expected) == float(ours) or repr(float(expected)) == repr(float(ours))
    except ValueError:
        return False


def test_snapshot_and_stream_say_the_same_and_what_the_source_says(world: CdcWorld) -> None:
    random = Random(29)
    columns = ", ".join(
        f"{name} {kind.sql}" + (f", {name}_a {kind.sql}[]" if kind.has_arrays else "")
        for name, kind in _KINDS.items()
    )
    world.sql(
        "CREATE TYPE mood AS ENUM ('sad', 'it''s')",
        f"CREATE TABLE v (id int PRIMARY KEY, bits varbit, half int[], {columns})",
    )
    rows = [_random_row(random) for _ in range(_ROWS)]
    world.sql(*_inserts(rows, 0))
    command = world.follow("--tables", "public.*")
    world.wait_until_read(command)
    world.sql(*_inserts(rows, 1_000))
    world.wait_until_read(command)
    command.end()

    ours = {row["id"]: row for row in world.rows("v")}
    assert sorted(ours) == [*range(_ROWS), *range(1_000, 1_000 + _ROWS)]
    for at in range(_ROWS):
        first, again = ours[at], ours[at + 1_000]
        for name in first.keys() - {"id"}:
            assert repr(first[name]) == repr(again[name]), (name, rows[at].get(name))
    _compare(world, ours)


def _random_row(random: Random) -> dict[str, str]:
    row = {"bits": random.choice(["", "0", "0101"]), "half": random.choice(["{}", "{1,NULL}"])}
    for name, kind in _KINDS.items():
        if random.random() < 0.9:
            row[name] = random.choice(kind.literals)
        if kind.has_arrays and random.random() < 0.9:
            items = [random.choice((*kind.literals, None)) for _ in range(random.randrange(4))]
            texts = ("NULL" if item is None else _quoted(item) for item in items)
            row[f"{name}_a"] = "{" + ",".join(texts) + "}"
    return row


def _quoted(item: str) -> str:
    return '"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _inserts(rows: list[dict[str, str]], base: int) -> list[str]:
    statements = []
    for at, row in enumerate(rows):
        values = ", ".join("'" + value.replace("'", "''") + "'" for value in row.values())
        statements.append(f"INSERT INTO v (id, {', '.join(row)}) VALUES ({base + at}, {values})")
    return statements


def _compare(world: CdcWorld, ours: dict[int, dict[str, Any]]) -> None:
    for name, kind in _KINDS.items():
        expression = _IN_UTC if name == "zoned" else kind.expression
        one = f"(SELECT {expression} FROM (SELECT {name} AS v) s)"
        _compare_column(world, ours, name, one, kind.shown)
        if kind.has_arrays:
            # An array of times with a zone is as PostgreSQL prints it.
            each = "v::text" if name == "zoned" else kind.expression
            many = (
                f"CASE WHEN {name}_a IS NOT NULL THEN '[' || coalesce((SELECT"
                f" string_agg(coalesce({each}, 'NULL'), '|' ORDER BY n) FROM"
                f" unnest({name}_a) WITH ORDINALITY s (v, n)), '') || ']' END"
            )

            def shown(items: list[Any], kind: Kind = kind) -> str:
                texts = ("NULL" if item is None else kind.shown(item) for item in items)
                return f"[{'|'.join(texts)}]"

            _compare_column(world, ours, f"{name}_a", many, shown)


def _compare_column(
    world: CdcWorld,
    ours: dict[int, dict[str, Any]],
    name: str,
    expression: str,
    shown: Callable[[Any], str],
) -> None:
    lines = world.sql(
        f"SELECT id || '=' || coalesce({expression}, '(null)') FROM v WHERE id < 1000"
    )
    for line in lines:
        at, _, expected = line.partition("=")
        value = ours[int(at)][name]
        found = "(null)" if value is None else shown(value)
        parts = zip(expected.strip("[]").split("|"), found.strip("[]").split("|"), strict=True)
        assert all(_same(*pair) for pair in parts), (name, expected, found)


_WIDE: Final = {
    "text": "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 400) i)",
    "bytea": "(SELECT string_agg(decode(md5(i::text), 'hex'), '') FROM generate_series(1, 400) i)",
    "jsonb": "(SELECT jsonb_agg(md5(i::text)) FROM generate_series(1, 400) i)",
    "varbit": "(SELECT string_agg((i % 64)::bit(6)::text, '') FROM generate_series(1, 9000) i)"
    "::varbit",
    "hstore": "(SELECT hstore(array_agg(md5(i::text)), array_agg(md5(i::text)))"
    " FROM generate_series(1, 400) i)",
    "polygon": "(SELECT polygon(path('((' || string_agg(i || ',' || i, '),(') || '))'))"
    " FROM generate_series(1, 600) i)",
    **{
        f"{kind}[]": f"(SELECT array_agg({each}) FROM generate_series(1, 3000) i)"
        for kind, each in {
            "int2": "(i % 30000)::int2",
            "int4": "i",
            "int8": "i::int8",
            "float8": "i::float8",
            "numeric": "(i / 7.0)",
            "bool": "i % 3 = 0",
            "date": "date '2000-01-01' + i",
            "timestamp": "timestamp '2000-01-01' + i * interval '1 h'",
            "timestamptz": "timestamptz '2000-01-01' + i * interval '1 h'",
            "time": "time '00:00' + i * interval '1 s'",
            "uuid": "md5(i::text)::uuid",
            "text": "md5(i::text)",
            "bytea": "decode(md5(i::text), 'hex')",
            "inet": "('10.0.' || i % 250 || '.1')::inet",
            "mood": "'sad'::mood",
            "bit(3)": "(i % 8)::bit(3)",
        }.items()
    },
}


def test_a_large_value_that_an_update_leaves_alone_stays_in_each_type(world: CdcWorld) -> None:
    world.sql("CREATE EXTENSION hstore", "CREATE TYPE mood AS ENUM ('sad')")
    tables = [f"t{at}" for at in range(len(_WIDE))]
    for table, (kind, value) in zip(tables, _WIDE.items(), strict=True):
        world.sql(
            f"CREATE TABLE {table} (id int PRIMARY KEY, n int, v {kind})",
            f"ALTER TABLE {table} ALTER v SET STORAGE EXTERNAL",
            f"INSERT INTO {table} SELECT 1, 0, {value}",
        )
    command = world.follow("--tables", "public.*")
    world.wait_until_read(command)
    before = {table: world.rows(table)[0]["v"] for table in tables}

    world.sql(*(f"UPDATE {table} SET n = 1" for table in tables))
    world.wait_until_read(command)
    command.end()

    for table, kind in zip(tables, _WIDE, strict=True):
        assert before[table] is not None, kind
        assert world.rows(table) == [{"id": 1, "n": 1, "v": before[table]}], kind


def test_what_has_no_form_ends_the_command_or_is_left_out(world: CdcWorld) -> None:
    world.sql(
        "CREATE TABLE deep (id int PRIMARY KEY, nested int[][], flat int[])",
        "CREATE TABLE k (k timestamptz PRIMARY KEY, v int)",
        "CREATE TABLE odd (id int PRIMARY KEY, n numeric(5,2))",
        "INSERT INTO odd VALUES (1, 1), (2, 'NaN')",
        "INSERT INTO deep VALUES (1, '{{1,2},{3,4}}', '{5}')",
        "INSERT INTO k VALUES ('9999-12-31 23:59:59.999999+00', 2), ('2026-01-01', 4)",
    )
    command = world.follow("--tables", "public.*")
    world.wait_until_read(command)
    assert world.rows("deep") == [{"id": 1, "flat": [5]}]
    # In rows that are there at the first look it stops no other table.
    assert "public.odd is not followed: table" in command.said()
    world.sql("CREATE TABLE odd_2 (k date PRIMARY KEY)", "INSERT INTO odd_2 VALUES ('infinity')")
    world.wait_until_said(command, "the value '2932897' does not fit type date32")

    world.sql("INSERT INTO deep VALUES (2, NULL, '{6}')", "INSERT INTO k VALUES ('infinity', 1)")
    code, said = command.finish()
    assert code == 1
    assert "column 'k': the value 'infinity' does not fit type timestamp" in said
    assert "Traceback" not in said
    assert [row["v"] for row in world.rows("k")] == [4, 2]

    command = world.follow("--tables", "public.*", "--exclude", "public.k")
    world.wait_until_read(command)
    assert [row["flat"] for row in world.rows("deep")] == [[5], [6]]
    world.sql("INSERT INTO deep VALUES (3, NULL, '{{1},{2}}')")
    code, said = command.finish()
    assert code == 1
    assert "column 'flat': the value '{{1},{2}}' does not fit type array" in said
