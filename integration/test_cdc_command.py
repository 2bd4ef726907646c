"""`streamhouse cdc` between a real PostgreSQL and a real service: what comes over, and as what."""

from __future__ import annotations

import datetime as dt
import subprocess
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import pytest

from integration.cdc_world import CdcCommand, CdcWorld, server, world
from integration.judges.postgres_server import USER

__all__ = ["server", "world"]

pytestmark = [pytest.mark.slow, pytest.mark.judge, pytest.mark.timeout(600)]

# The table of docs/cdc.md.
_TYPES: Final = {
    "id": "int32",
    "small": "int16",
    "big": "int64",
    "f4": "float",
    "f8": "double",
    "yes": "bool",
    "price": "decimal128(12, 2)",
    "anything": "string",
    "cost": "decimal128(19, 2)",
    "day": "date32[day]",
    "at": "timestamp[us]",
    "instant": "timestamp[us, tz=UTC]",
    "clock": "string",
    "span": "string",
    "u": "string",
    "j": "string",
    "raw": "binary",
    "m": "string",
    "ints": "list<element: int32>",
    "texts": "list<element: string>",
    "r": "string",
    "ip": "string",
    "spot": "string",
    "wide": "string",
}
_WIDE: Final = "repeat(md5(random()::text), 200)"


def test_each_type_and_each_kind_of_change_comes_over(world: CdcWorld) -> None:
    world.sql(
        "CREATE TYPE mood AS ENUM ('sad', 'happy')",
        """CREATE TABLE things (
            id int PRIMARY KEY, small int2, big int8, f4 float4, f8 float8, yes bool,
            price numeric(12,2), anything numeric, cost money, day date, at timestamp,
            instant timestamptz, clock time, span interval, u uuid, j jsonb, raw bytea, m mood,
            ints int[], texts text[], r int4range, ip inet, spot point, wide text)""",
        f"""INSERT INTO things VALUES (1, -2, 9000000000, 1.5, 2.25, true, 12.30, 1e30, '7.50',
            '2024-02-29', '2024-02-29 01:02:03.000456', '2024-02-29 01:02:03.000456+02',
            '04:05:06.7', '1 day 2 hours', '00000000-0000-0000-0000-0000000000ff',
            '{{"a": [1, 2]}}', '\\x00ff', 'happy', '{{1,NULL,3}}', '{{a,"b c"}}',
            '[1,5)', '10.0.0.1', '(1,2)', {_WIDE})""",
        "INSERT INTO things (id, instant, day) VALUES (2, 'infinity', '-infinity')",
    )
    command = world.follow("--tables", "public.*")
    world.wait_until_read(command)

    one, two = world.rows("things")

    table = world.client.describe_table(f"{world.database}.things")
    assert {field.name: str(field.type) for field in table.schema.to_arrow()} == _TYPES
    wide = world.sql("SELECT wide FROM things WHERE id = 1")[0]
    expected = {
        "id": 1,
        "small": -2,
        "big": 9_000_000_000,
        "f4": 1.5,
        "f8": 2.25,
        "yes": True,
        "price": Decimal("12.30"),
        "cost": Decimal("7.50"),
        "day": dt.date(2024, 2, 29),
        "at": dt.datetime(2024, 2, 29, 1, 2, 3, 456),
        "instant": dt.datetime(2024, 2, 28, 23, 2, 3, 456, tzinfo=dt.UTC),
        "clock": "04:05:06.7",
        "u": "00000000-0000-0000-0000-0000000000ff",
        "j": '{"a": [1, 2]}',
        "raw": b"\x00\xff",
        "m": "happy",
        "ints": [1, None, 3],
        "texts": ["a", "b c"],
        "r": "[1,5)",
        "ip": "10.0.0.1",
        "wide": wide,
    }
    assert {name: one[name] for name in expected} == expected
    assert Decimal(one["anything"]) == Decimal("1e30")
    assert '"x":1' in one["spot"].replace(" ", "").replace("1.0", "1")
    assert two["instant"].year == 9999
    assert two["day"].year == 1

    _check_changes(world, command, one)
    command.end()
    assert command.process.returncode == 0, command.said()


def _check_changes(world: CdcWorld, command: CdcCommand, one: dict[str, Any]) -> None:
    """A wide value that is not touched, a new key, a delete, and a truncation come over."""
    world.sql(
        "UPDATE things SET small = 5 WHERE id = 1",
        "UPDATE things SET id = 10 WHERE id = 1",
        "BEGIN; UPDATE things SET big = 1 WHERE id = 10; UPDATE things SET f8 = 0 WHERE id = 10;"
        " COMMIT",
        "DELETE FROM things WHERE id = 2",
    )
    world.wait_until_read(command)
    (ten,) = world.rows("things")
    assert ten == {**one, "id": 10, "small": 5, "big": 1, "f8": 0.0}

    world.sql(
        "BEGIN; INSERT INTO things (id) VALUES (3); TRUNCATE things;"
        " INSERT INTO things (id) VALUES (4); COMMIT",
        "INSERT INTO things (id) VALUES (5)",
    )
    world.wait_until_read(command)
    assert [row["id"] for row in world.rows("things")] == [4, 5]


def test_columns_are_added_and_widened_and_other_changes_stop(world: CdcWorld) -> None:
    world.sql(
        "CREATE TABLE t (id int PRIMARY KEY, n int, d numeric(6,2))",
        "INSERT INTO t VALUES (1, 1, 1)",
    )
    command = world.follow("--tables", "public.*")
    world.wait_until_read(command)
    world.sql(
        "ALTER TABLE t ADD COLUMN more text DEFAULT 'x'",
        "INSERT INTO t VALUES (2, 2, 2, 'y')",
        "ALTER TABLE t ALTER n TYPE bigint, ALTER d TYPE numeric(10,2)",
        "INSERT INTO t VALUES (3, 9000000000, 12345678.90, 'z')",
        "ALTER TABLE t DROP COLUMN more",
        "INSERT INTO t VALUES (4, 4, 4)",
    )
    world.wait_until_read(command)
    found = [(row["id"], row["n"], row["d"], row["more"]) for row in world.rows("t")]
    assert found == [
        (1, 1, Decimal("1.00"), None),
        (2, 2, Decimal("2.00"), "y"),
        (3, 9_000_000_000, Decimal("12345678.90"), "z"),
        (4, 4, Decimal("4.00"), None),
    ]

    world.sql(
        "INSERT INTO t VALUES (5, 5, 5)",
        "ALTER TABLE t ALTER n TYPE text",
        "INSERT INTO t VALUES (6, 'six', 6)",
    )
    code, said = command.finish()
    assert code == 1
    assert f"table '{world.database}.t': column 'n' is bigint, and in 'public.t' it" in said
    assert [row["id"] for row in world.rows("t")] == [1, 2, 3, 4, 5]


def test_what_cannot_be_followed_is_said(world: CdcWorld) -> None:
    world.sql("CREATE TABLE nokey (a int)", "CREATE TABLE t (id int PRIMARY KEY)")
    refused = {
        ("public.nokey",): "public.nokey is not followed: it has no primary key",
        ("nothing.*",): "no table matches 'nothing.*'",
    }
    for patterns, sentence in refused.items():
        code, said = world.follow("--tables", *patterns).finish()
        assert code == 1
        assert sentence in said
        assert "Traceback" not in said
    assert world.client.list_tables() == []

    # Published without an identity, it would refuse updates of the source's own users.
    keyless = ("--tables", "public.nokey", "--keyless", "append")
    code, said = world.follow(*keyless).finish()
    assert code == 1
    assert "ALTER TABLE public.nokey REPLICA IDENTITY FULL" in said
    world.sql("ALTER TABLE nokey REPLICA IDENTITY FULL")
    command = world.follow("--tables", "public.*", "--keyless", "append")
    world.wait_until_read(command)
    world.sql("INSERT INTO nokey VALUES (1), (2)")
    world.wait_until_read(command)
    assert [(row["a"], row["__op"]) for row in world.rows("nokey")] == [(1, "c"), (2, "c")]

    # A second one beside it would be told so after a minute; taken away it says what was lost.
    command.end()
    world.sql(f"SELECT pg_drop_replication_slot('streamhouse_{world.database}')")
    code, said = world.follow("--tables", "public.*", "--keyless", "append").finish()
    assert code == 1
    assert "is gone, and with it changes that were not read; start with --snapshot" in said

    world.sql("INSERT INTO t VALUES (1), (2)")
    command = world.follow("--tables", "public.*", "--keyless", "append", "--snapshot")
    world.wait_until_read(command)
    assert [row["id"] for row in world.rows("t")] == [1, 2]
    assert [(row["a"], row["__op"]) for row in world.rows("nokey")] == [(1, "r"), (2, "r")]
    command.end()

    dropped = world.drop()
    assert f"dropped streamhouse_{world.database}" in dropped
    ours = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
    assert world.sql(ours) == ["0"]
    assert world.sql("SELECT count(*) FROM pg_publication") == ["0"]


def test_the_password_is_shown_nowhere(world: CdcWorld) -> None:
    password = world.server.environment()["PGPASSWORD"]
    url = world.url.replace(f"{USER}@", f"{USER}:{password}@")
    command = world.follow("--tables", "public.marker", url=url)
    world.wait_until_read(command)

    process = Path("/proc") / str(command.process.pid)
    shown = process.joinpath("cmdline").read_bytes() + process.joinpath("environ").read_bytes()
    assert password.encode() not in shown
    listed = subprocess.run(["ps", "axeww"], capture_output=True, text=True, check=False).stdout
    assert password not in listed
    command.end()
    assert password not in command.said()
