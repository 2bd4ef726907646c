"""`streamhouse cdc` and tables that cannot be followed: each is named, none stops the others, and
nothing is done to it in the source.
"""

from __future__ import annotations

from typing import Final

import pytest

from integration.cdc_world import CdcWorld, server, world

__all__ = ["server", "world"]

pytestmark = [pytest.mark.slow, pytest.mark.judge, pytest.mark.timeout(600)]

_REFUSED: Final = {
    "by_index": "the REPLICA IDENTITY is an index without column 'id' of the primary key",
    "nothing": "the REPLICA IDENTITY is NOTHING",
    "deferred": "its primary key is DEFERRABLE",
    "computed": "column 'id' of its primary key is generated",
    "floating": "column 'id' of its primary key is float8",
    "keyless": "it has no primary key",
    "parent": "other tables inherit from it",
    "parts": "the REPLICA IDENTITY of partition 'public.part_1' is NOTHING",
}


def _published(world: CdcWorld) -> set[str]:
    return set(world.sql("SELECT tablename FROM pg_publication_tables"))


def test_a_table_that_cannot_be_followed_stops_no_other(world: CdcWorld) -> None:
    world.sql(
        "CREATE TABLE good (id int PRIMARY KEY, n int)",
        "INSERT INTO good VALUES (1, 1)",
        "CREATE TABLE by_index (id int PRIMARY KEY, n text NOT NULL)",
        "CREATE UNIQUE INDEX by_n ON by_index (n)",
        "ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_n",
        "INSERT INTO by_index VALUES (1, 'a'), (2, 'b')",
        "CREATE TABLE nothing (id int PRIMARY KEY, n int)",
        "ALTER TABLE nothing REPLICA IDENTITY NOTHING",
        "INSERT INTO nothing VALUES (1, 1)",
        "CREATE TABLE deferred (id int PRIMARY KEY DEFERRABLE, n int)",
        "CREATE TABLE computed (n int, id int GENERATED ALWAYS AS (n * 2) STORED PRIMARY KEY)",
        "CREATE TABLE floating (id float8 PRIMARY KEY)",
        "CREATE TABLE keyless (n int)",
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE heir (PRIMARY KEY (id)) INHERITS (parent)",
        "CREATE TABLE parts (id int PRIMARY KEY, n int) PARTITION BY RANGE (id)",
        "CREATE TABLE part_1 PARTITION OF parts FOR VALUES FROM (0) TO (10)",
        "ALTER TABLE part_1 REPLICA IDENTITY NOTHING",
        "CREATE TABLE left_out (id int PRIMARY KEY)",
    )
    command = world.follow("--tables", "public.*", "--exclude", "left_*")
    world.wait_until_read(command)

    for table, why in _REFUSED.items():
        assert f"public.{table} is not followed: {why}" in command.said()
    assert "left_out" not in command.said()
    assert _published(world) == {"good", "marker", "heir"}
    # The source's own users may do with such tables what they could before.
    world.sql("UPDATE nothing SET n = 2", "DELETE FROM nothing", "UPDATE parts SET n = 1")
    world.sql("UPDATE good SET n = 2")

    world.sql("ALTER TABLE by_index REPLICA IDENTITY DEFAULT")
    world.wait_until_followed(command, "public.by_index")
    world.sql("UPDATE by_index SET id = 51 WHERE id = 1", "DELETE FROM by_index WHERE id = 2")
    world.wait_until_read(command)
    assert world.rows("by_index") == [{"id": 51, "n": "a"}]
    assert world.rows("good") == [{"id": 1, "n": 2}]
    assert command.said().count("nothing is not followed") == 1
    command.end()

    code, said = world.follow("--tables", "public.no*", "--name", "other").finish()
    assert code == 1
    assert "none of the tables that --tables names can be followed" in said
    assert "Traceback" not in said


def test_a_replica_identity_that_changes_ends_the_command(world: CdcWorld) -> None:
    world.sql(
        "CREATE TABLE a (id int PRIMARY KEY, n text NOT NULL)",
        "CREATE TABLE b (id int PRIMARY KEY, n int)",
        "CREATE UNIQUE INDEX by_n ON a (n)",
        "INSERT INTO a VALUES (1, 'a'), (2, 'b')",
    )
    command = world.follow("--tables", "public.*")
    world.wait_until_read(command)
    world.sql(
        "INSERT INTO a VALUES (3, 'c')",
        "ALTER TABLE a REPLICA IDENTITY USING INDEX by_n",
        "DELETE FROM a WHERE id = 2",
    )
    said = "'public.a' cannot be followed any longer: the REPLICA IDENTITY is an index without"
    for running in (command, world.follow("--tables", "public.*")):
        code, text = running.finish()
        assert code == 1
        assert said in text
        assert "Traceback" not in text

    command = world.follow("--tables", "public.*", "--exclude", "public.a")
    world.sql("INSERT INTO b VALUES (1, 1)", "UPDATE a SET n = 'd' WHERE id = 3")
    world.wait_until_read(command)
    assert world.rows("b") == [{"id": 1, "n": 1}]
    assert _published(world) == {"b", "marker"}
    command.end()

    # What passed by while it was left out is read anew.
    world.sql("ALTER TABLE a REPLICA IDENTITY DEFAULT", "DELETE FROM a WHERE id = 1")
    command = world.follow("--tables", "public.*")
    world.wait_until_followed(command, "public.a")
    world.wait_until_read(command)
    assert world.rows("a") == [{"id": 3, "n": "d"}]
    command.end()


def test_a_row_that_breaks_our_constraint_ends_the_command_until_the_constraint_is_dropped(
    world: CdcWorld,
) -> None:
    world.sql("CREATE TABLE held (id int PRIMARY KEY, n int)", "INSERT INTO held VALUES (1, 1)")
    command = world.follow("--tables", "public.*")
    world.wait_until_read(command)
    ours = f"{world.database}.held"
    world.client.alter_properties(ours, updates={"table.check.small": "n <= 100"})
    world.sql("INSERT INTO held VALUES (2, 2)")
    world.wait_until_read(command)

    world.sql("INSERT INTO held VALUES (3, 101)", "INSERT INTO held VALUES (4, 4)")

    for number in range(2):
        code, said = (command if not number else world.follow("--tables", "public.*")).finish()
        assert code == 1
        assert "breaks constraint 'small', CHECK (n <= 100): n = 101" in said
        assert "Traceback" not in said
        # Nothing after the refused row is written.
        assert [row["id"] for row in world.rows("held")] == [1, 2]
    world.client.alter_properties(ours, removals=["table.check.small"])
    world.wait_until_read(world.follow("--tables", "public.*"))
    assert [row["id"] for row in world.rows("held")] == [1, 2, 3, 4]
