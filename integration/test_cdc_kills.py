"""`streamhouse cdc` brings each change over once, whoever is killed -9 at whichever moment."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Final

import pytest

from integration.cdc_world import CdcCommand, CdcWorld, open_world, server
from integration.judges.postgres_server import PostgresServer

__all__ = ["server"]

pytestmark = [pytest.mark.slow, pytest.mark.judge, pytest.mark.timeout(600)]

_SEEDS: Final = (16, 1603)
_ROUNDS: Final = 6
_MOMENT_S_MAX: Final = 6.0
_WIDE: Final = "repeat(md5(random()::text), 200)"
_FOLLOW: Final = ("--tables", "public.*", "--keyless", "append")


@pytest.mark.parametrize("seed", _SEEDS)
def test_each_row_is_there_once_whoever_is_killed(
    server: PostgresServer, tmp_path: Path, seed: int
) -> None:
    with open_world(server, tmp_path, f"kills_{seed}") as world:
        _check(world, random.Random(seed))


def _check(world: CdcWorld, chance: random.Random) -> None:
    world.sql(
        "CREATE TABLE a (id int PRIMARY KEY, n int, wide text)",
        "CREATE TABLE b (id int, part text, n int, PRIMARY KEY (id, part))",
        "CREATE TABLE l (id bigserial, n int)",
        "ALTER TABLE l REPLICA IDENTITY FULL",
        f"INSERT INTO a SELECT i, 0, {_WIDE} FROM generate_series(1, 300) i",
        "INSERT INTO b SELECT i, 'p', 0 FROM generate_series(1, 300) i",
        "INSERT INTO l (n) SELECT i FROM generate_series(1, 300) i",
    )
    tables = {"a": "id, n, wide", "b": "id, part, n", "l": "id, n"}
    command = world.follow(*_FOLLOW)
    for step in range(_ROUNDS):
        for _ in range(chance.randrange(1, 12)):
            world.sql(*_some_changes(chance, tables))
        if step in (2, 4):
            name = f"late{step}"
            world.sql(
                f"CREATE TABLE {name} (id int PRIMARY KEY, n int)",
                f"INSERT INTO {name} SELECT i, 0 FROM generate_series(1, 500) i",
            )
            tables[name] = "id, n"
        if step == 1:
            world.wait_until_read(command)
        time.sleep(chance.uniform(0, _MOMENT_S_MAX))  # sleep: one dies at any moment
        victim = chance.choice(["command", "command", "server", "service"])
        command = _kill(world, command, victim)
        world.sql(*_some_changes(chance, tables))
    for name in tables:
        world.wait_until_followed(command, f"public.{name}")
    world.wait_until_read(command)

    for table, columns in tables.items():
        source = sorted(world.sql(f"SELECT {columns} FROM {table}"))
        names = columns.split(", ")
        ours = sorted("|".join(str(row[name]) for name in names) for row in world.rows(table))
        assert ours == source, table
    for table, columns in tables.items():
        if table != "l":
            _check_log(world, table, key=columns.split(", ")[: 2 if table == "b" else 1])
    command.end()


def _kill(world: CdcWorld, command: CdcCommand, victim: str) -> CdcCommand:
    if victim == "command":
        command.end(signal.SIGKILL)
        return world.follow(*_FOLLOW)
    if victim == "server":
        world.server.kill()
        world.server.start_again()
    else:
        world.kill_service()
    return command


def _some_changes(chance: random.Random, tables: dict[str, str]) -> list[str]:
    """Transactions over all tables: new rows, updates that leave the wide value, deletes."""
    ids = f"{chance.randrange(1, 400)} AND {chance.randrange(1, 400)}"
    keys = f"id BETWEEN {chance.randrange(1, 200)} AND {chance.randrange(150, 400)}"
    number = chance.randrange(10**6)
    late = [
        f"BEGIN; UPDATE {name} SET n = n + 1 WHERE {keys}; DELETE FROM {name} WHERE id ="
        f" {chance.randrange(1, 500)}; INSERT INTO l (n) VALUES ({number}); COMMIT"
        for name in tables
        if name.startswith("late")
    ]
    return [
        *late,
        f"BEGIN; UPDATE a SET n = {number} WHERE {keys}; UPDATE b SET n = {number} WHERE {keys};"
        f" DELETE FROM b WHERE id BETWEEN {ids}; COMMIT",
        f"INSERT INTO b SELECT i, 'q', {number} FROM generate_series(200,"
        f" {chance.randrange(201, 300)}) i ON CONFLICT (id, part) DO UPDATE SET n = b.n + 1",
        f"BEGIN; DELETE FROM a WHERE id = {chance.randrange(1, 300)}; UPDATE a SET id = id + 1000"
        f" WHERE id = {chance.randrange(1, 300)} AND NOT EXISTS (SELECT 1 FROM a x WHERE x.id ="
        f" a.id + 1000); COMMIT",
        f"INSERT INTO l (n) SELECT {number} FROM generate_series(1, {chance.randrange(1, 20)})",
        "BEGIN; UPDATE a SET n = -1; ROLLBACK",
    ]


def _check_log(world: CdcWorld, table: str, *, key: list[str]) -> None:
    """The changelog tells one story: an insert where nothing is, all else where something is."""
    log = world.client.read(f"{world.database}.{table}$changelog").to_pylist()
    live: dict[tuple[object, ...], object] = {}
    for row in sorted(log, key=lambda row: row["__offset"]):
        at, kind = tuple(row[name] for name in key), row["__change_type"]
        if kind in ("-U", "-D"):
            assert live.pop(at) == row["n"]
        else:
            assert at not in live
            live[at] = row["n"]
