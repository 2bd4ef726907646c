"""Consumer groups over a socket: members in every version, positions, and who looks at them."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from streamhouse.core.errors import NotOwnerError
from streamhouse.storage_service.kafka.groups._member import Member
from streamhouse.storage_service.kafka.groups.coordinator import GroupLimits
from streamhouse.storage_service.kafka.groups.coordinator_shard import coordinator_of
from streamhouse.storage_service.kafka.topics import table_paths_of
from streamhouse.storage_service.server.access._grants import token_hash
from tests.support.in_process_service import (
    EVENTS,
    event_rows,
    table_descriptor,
    until,
)
from tests.support.kafka_world import KafkaClient, KafkaWorld, kafka_door, kafka_world
from tests.support.memory_store import MemoryStore
from tests.support.shard_world import ShardWorld

OFFSET_COMMIT, OFFSET_FETCH, JOIN, HEARTBEAT, LEAVE, SYNC = 8, 9, 11, 12, 13, 14
METADATA, FIND_COORDINATOR = 3, 10
DESCRIBE, LIST, DELETE, OFFSET_DELETE = 15, 16, 42, 47
# Nobody waits for its end, however slow the machine is.
SESSION = datetime.timedelta(minutes=5)
GROUP = "billing"
_LATER = ErrorCode.coordinator_load_in_progress


def _begins_at_once(world: KafkaWorld) -> None:
    world.door._broker.groups.coordinator._limits = GroupLimits(initial_delay_s=0)


@contextlib.asynccontextmanager
async def group_world(path: Path, **arguments: Any) -> AsyncIterator[KafkaWorld]:
    """A door whose groups wait for nobody, and a table of two buckets with 10 and 5 rows."""
    async with kafka_world(path, **arguments) as world:
        _begins_at_once(world)
        await world.http.create_table(bucket_count=2)
        await world.http.append([(0, 0, event_rows(0, 10)), (1, 0, event_rows(0, 5))])
        yield world


async def _join(client: KafkaClient, member_id: str = "", *, version: int = 9, **given: Any) -> Any:
    asked: dict[str, Any] = {
        "group_id": GROUP,
        "session_timeout": SESSION,
        "member_id": member_id,
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b"topics"}],
    }
    if version:
        asked["rebalance_timeout"] = SESSION
    return await client.call(JOIN, version, **(asked | given))


async def _come(client: KafkaClient, **given: Any) -> Any:
    first = await _join(client, **given)
    assert first.error_code is ErrorCode.member_id_required
    return await _join(client, first.member_id, **given)


async def _sync(client: KafkaClient, joined: Any, *, version: int = 5, **parts: bytes) -> Any:
    return await client.call(
        SYNC,
        version,
        group_id=GROUP,
        generation_id=joined.generation_id,
        member_id=joined.member_id,
        assignments=[
            {"member_id": one.member_id, "assignment": b"for " + one.member_id.encode()}
            for one in joined.members
        ],
    )


async def _heartbeat(client: KafkaClient, joined: Any, *, version: int = 4) -> ErrorCode:
    answer = await client.call(
        HEARTBEAT,
        version,
        group_id=GROUP,
        generation_id=joined.generation_id,
        member_id=joined.member_id,
    )
    return ErrorCode(answer.error_code)


async def _commit(
    client: KafkaClient,
    offsets: dict[int, int],
    *,
    version: int = 8,
    topic: str = "events",
    group_id: str = GROUP,
    joined: Any = None,
) -> dict[int, ErrorCode]:
    answer = await client.call(
        OFFSET_COMMIT,
        version,
        group_id=group_id,
        generation_id_or_member_epoch=-1 if joined is None else joined.generation_id,
        member_id="" if joined is None else joined.member_id,
        topics=[
            {
                "name": topic,
                "partitions": [
                    {"partition_index": one, "committed_offset": at, "committed_metadata": "note"}
                    for one, at in offsets.items()
                ],
            }
        ],
    )
    return {p.partition_index: p.error_code for t in answer.topics for p in t.partitions}


async def _fetch(
    client: KafkaClient,
    partitions: list[int] | None = None,
    *,
    version: int = 8,
    topic: str = "events",
    group_id: str = GROUP,
) -> dict[str, dict[int, int]] | ErrorCode:
    asked = None
    if partitions is not None:
        asked = [{"name": topic, "partition_indexes": partitions}]
    if version < 8:
        group = await client.call(OFFSET_FETCH, version, group_id=group_id, topics=asked)
    else:
        answer = await client.call(
            OFFSET_FETCH, version, groups=[{"group_id": group_id, "topics": asked}]
        )
        (group,) = answer.groups
    error = getattr(group, "error_code", ErrorCode.none)
    if error is not ErrorCode.none:
        return ErrorCode(error)
    return {
        t.name: {p.partition_index: p.committed_offset for p in t.partitions} for t in group.topics
    }


def _waiting(world: KafkaWorld) -> list[Member]:
    """The members that wait for a generation."""
    groups = world.door._broker.groups.coordinator.groups()
    members = (member for _, group in groups for member in group._members.values())
    return [member for member in members if member.on_joined is not None]


async def _one_is_in_and_another_comes(
    world: KafkaWorld, one: KafkaClient, two: KafkaClient
) -> tuple[Any, asyncio.Future[Any]]:
    """Return what the first was told when it joined, and what the second waits for."""
    first = await _come(one)
    await _sync(one, first)
    coming = asyncio.ensure_future(_come(two))
    await until(lambda: _waiting(world) != [])
    assert await _heartbeat(one, first) is ErrorCode.rebalance_in_progress
    return first, coming


async def _state(client: KafkaClient, group_id: str = GROUP) -> str:
    answer = await client.call(DESCRIBE, 5, groups=[group_id])
    assert answer.groups[0].error_code is ErrorCode.none
    return str(answer.groups[0].group_state)


@pytest.mark.parametrize("version", range(10))
async def test_members_join_sync_and_leave_in_every_version(tmp_path: Path, version: int) -> None:
    async with group_world(tmp_path) as world:
        client = await world.client()
        come = _join if version < 4 else _come
        joined = await come(client, version=version)
        assert (joined.error_code, joined.generation_id) == (ErrorCode.none, 1)
        assert joined.leader == joined.member_id
        assert [one.metadata for one in joined.members] == [b"topics"]

        synced = await _sync(client, joined, version=min(version, 5))
        assert synced.assignment == b"for " + joined.member_id.encode()
        assert await _heartbeat(client, joined, version=min(version, 4)) is ErrorCode.none
        leaving: dict[str, Any] = {"member_id": joined.member_id}
        if version >= 3:
            leaving = {"members": [leaving]}
        left = await client.call(LEAVE, min(version, 5), group_id=GROUP, **leaving)
        assert left.error_code is ErrorCode.none
        assert await _heartbeat(client, joined) is ErrorCode.unknown_member_id


async def test_two_members_share_the_work_and_one_that_dies_gives_it_back(tmp_path: Path) -> None:
    async with group_world(tmp_path) as world:
        one, two = await world.client(), await world.client()
        first, coming = await _one_is_in_and_another_comes(world, one, two)
        first = await _join(one, first.member_id)
        second = await coming
        assert (first.generation_id, second.generation_id) == (2, 2)
        assert (len(first.members), len(second.members)) == (2, 0)
        waiting = asyncio.ensure_future(_sync(two, second))
        await _sync(one, first)
        assert (await waiting).assignment == b"for " + second.member_id.encode()

        assert await _commit(two, {1: 3}, joined=second) == {1: ErrorCode.none}
        left = await two.call(LEAVE, 5, group_id=GROUP, members=[{"member_id": second.member_id}])
        assert left.members[0].error_code is ErrorCode.none
        assert await _heartbeat(one, first) is ErrorCode.rebalance_in_progress
        again = await _join(one, first.member_id)
        assert [m.member_id for m in again.members] == [first.member_id]
        await _sync(one, again)
        assert await _commit(two, {1: 5}, joined=second) == {1: ErrorCode.unknown_member_id}
        assert await _commit(one, {1: 5}, joined=first) == {1: ErrorCode.illegal_generation}
        assert await _commit(one, {0: 2}, joined=again) == {0: ErrorCode.none}
        assert await _fetch(one, [0, 1]) == {"events": {0: 2, 1: 3}}


async def test_a_wait_whose_connection_is_closed_is_given_up(tmp_path: Path) -> None:
    async with group_world(tmp_path) as world:
        one, two = await world.client(), await world.client()
        _, coming = await _one_is_in_and_another_comes(world, one, two)
        coming.cancel()
        await two.close()
        await until(lambda: _waiting(world) == [])
        group = world.door._broker.groups.coordinator.group(("owner", GROUP))
        assert group is not None
        assert group.member_count() == 1  # neither a member nor an id that it was given
        three = await world.client()
        assert (await _join(three)).error_code is ErrorCode.member_id_required
        await three.close()
        await until(lambda: group.member_count() == 1)


async def test_a_service_that_stops_keeps_no_member_waiting(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        coming = asyncio.ensure_future(_come(client))
        await until(lambda: _waiting(world) != [])
        await world.service.drain()
        assert (await coming).error_code is ErrorCode.not_coordinator


class _Lost:
    """A tenure that is over once `is_over`."""

    is_over = False

    def check(self) -> None:
        """See `Tenure.check`."""
        if self.is_over:
            raise NotOwnerError("another process owns the shard")

    check_write = check


async def test_a_process_that_owns_nothing_any_more_takes_no_positions_and_keeps_no_member(
    tmp_path: Path,
) -> None:
    tenure = _Lost()
    async with group_world(tmp_path, tenure=tenure) as world:
        client = await world.client()
        joined = await _come(client)
        await _sync(client, joined)
        assert await _commit(client, {0: 4}, joined=joined) == {0: ErrorCode.none}
        tenure.is_over = True
        gone = ErrorCode.not_coordinator
        assert await _heartbeat(client, joined) is gone
        assert await _commit(client, {0: 5}, joined=joined) == {0: gone}
        assert await _fetch(client, [0]) is _LATER
        assert (await _join(client, joined.member_id)).error_code is gone
        described = await client.call(DESCRIBE, 5, groups=[GROUP])
        assert described.groups[0].error_code is gone
        deleted = await client.call(DELETE, 2, groups_names=["other"])
        assert deleted.results[0].error_code is gone
        tenure.is_over = False
        assert await _fetch(client, [0]) == {"events": {0: 4}}


async def test_a_group_begins_after_a_moment_by_itself(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        joined = await _come(await world.client())
        assert joined.generation_id == 1


async def test_wrong_joins_are_told_what_is_wrong(tmp_path: Path) -> None:
    async with group_world(tmp_path) as world:
        client = await world.client()
        for given, error in (
            ({"group_id": "a b"}, ErrorCode.invalid_group_id),
            ({"group_id": ""}, ErrorCode.invalid_group_id),
            ({"session_timeout": datetime.timedelta(seconds=1)}, ErrorCode.invalid_session_timeout),
            ({"protocols": []}, ErrorCode.inconsistent_group_protocol),
            ({"member_id": "nobody"}, ErrorCode.unknown_member_id),
        ):
            for version in range(10):
                answer = await _join(client, version=version, **given)
                assert answer.error_code is error, (given, version)
        for version in range(6):
            nobody = await client.call(
                SYNC, version, group_id=GROUP, generation_id=1, member_id="nobody"
            )
            assert nobody.error_code is ErrorCode.unknown_member_id


@pytest.mark.parametrize("version", range(2, 9))
async def test_positions_are_kept_and_shown_as_those_of_other_readers(
    tmp_path: Path, version: int
) -> None:
    async with group_world(tmp_path) as world:
        client = await world.client()
        none = ErrorCode.none
        assert await _fetch(client, [0, 1, 7]) == {"events": {0: -1, 1: -1, 7: -1}}
        assert await _commit(client, {0: 4, 1: 5}, version=version) == {0: none, 1: none}
        assert await _commit(client, {0: 3}, version=version) == {0: none}
        fetched = max(1, version)
        assert await _fetch(client, [0, 1], version=fetched) == {"events": {0: 3, 1: 5}}
        assert await _fetch(client, version=fetched) == {"events": {0: 3, 1: 5}}
        listed = (await world.http.call("GET", "/v1/tables/events/consumers")).json()["consumers"]
        assert [(one["name"], one["lag_rows"], one["reads_lake"]) for one in listed] == [
            (GROUP, 7, True)
        ]
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        assert await _fetch(client, [0, 1]) == {"events": {0: 3, 1: 5}}
        assert await _state(client) == "Empty"


async def test_each_partition_is_answered_for_itself(tmp_path: Path) -> None:
    async with group_world(tmp_path) as world:
        client = await world.client()
        unknown, beyond = ErrorCode.unknown_topic_or_partition, ErrorCode.offset_out_of_range
        assert await _commit(client, {0: 11, 1: 5, 2: 0, 3: -1}) == {
            0: beyond,
            1: ErrorCode.none,
            2: unknown,
            3: unknown,
        }
        assert await _commit(client, {0: -3}) == {0: beyond}
        assert await _fetch(client, [0, 1]) == {"events": {0: -1, 1: 5}}
        assert await _commit(client, {0: 1}, topic="nothing") == {0: unknown}
        assert await _fetch(client, [0], topic="nothing") == {"nothing": {0: -1}}
        wrong = ErrorCode.invalid_group_id
        assert await _commit(client, {0: 1}, group_id="a/b") == {0: wrong}
        assert await _fetch(client, [0], group_id="a/b") is wrong


async def test_a_table_has_only_so_many_groups(tmp_path: Path) -> None:
    async with group_world(tmp_path) as world:
        client = await world.client()
        for number in range(100):
            assert await _commit(client, {0: 1}, group_id=f"g{number}") == {0: ErrorCode.none}
        assert await _commit(client, {0: 1}, group_id="more") == {0: ErrorCode.policy_violation}


async def test_groups_are_described_listed_and_deleted(tmp_path: Path) -> None:
    async with group_world(tmp_path) as world:
        client = await world.client()
        await _commit(client, {0: 4}, group_id="alone")
        joined = await _come(client)
        await _sync(client, joined)
        for version in range(6):
            described = await client.call(DESCRIBE, version, groups=[GROUP, "alone", "never"])
            stable, empty, dead = described.groups
            assert (stable.group_state, stable.protocol_data) == ("Stable", "range")
            assert [m.member_metadata for m in stable.members] == [b"topics"]
            assert stable.members[0].client_id == "test"
            assert (empty.group_state, dead.group_state) == ("Empty", "Dead")
        for version in range(6):
            listed = await client.call(LIST, version)
            assert [one.group_id for one in listed.groups] == ["alone", GROUP]
        stable = await client.call(LIST, 5, states_filter=["stable"], types_filter=["Classic"])
        assert [one.group_id for one in stable.groups] == [GROUP]
        assert not (await client.call(LIST, 5, types_filter=["share"])).groups
        for version in range(3):
            deleted = await client.call(DELETE, version, groups_names=[GROUP, "never"])
            assert [one.error_code for one in deleted.results] == [
                ErrorCode.non_empty_group,
                ErrorCode.group_id_not_found,
            ]
        deleted = await client.call(DELETE, 2, groups_names=["alone"])
        assert deleted.results[0].error_code is ErrorCode.none
        assert await _fetch(client, [0], group_id="alone") == {"events": {0: -1}}
        assert await _state(client, "alone") == "Dead"


async def test_who_looks_for_the_coordinator_is_told_why_a_name_is_none(tmp_path: Path) -> None:
    async with group_world(tmp_path) as world:
        client = await world.client()
        found = await client.call(FIND_COORDINATOR, 3, key=GROUP, key_type=0)
        assert (found.error_code, found.node_id) == (ErrorCode.none, 0)
        wrong = await client.call(FIND_COORDINATOR, 3, key="my group", key_type=0)
        assert wrong.error_code is ErrorCode.invalid_group_id
        assert "letters, digits" in wrong.error_message


async def test_positions_of_some_partitions_are_forgotten(tmp_path: Path) -> None:
    async with group_world(tmp_path) as world:
        client = await world.client()
        await _commit(client, {0: 4, 1: 5})

        async def forget(*partitions: int) -> Any:
            asked = [{"partition_index": one} for one in partitions]
            topics = [{"name": "events", "partitions": asked}]
            return await client.call(OFFSET_DELETE, 0, group_id=GROUP, topics=topics)

        answer = await forget(0)
        assert answer.topics[0].partitions[0].error_code is ErrorCode.none
        assert await _fetch(client) == {"events": {1: 5}}
        await _come(client)
        assert (await forget(1)).error_code is ErrorCode.non_empty_group
        assert await _fetch(client) == {"events": {1: 5}}


@pytest.mark.parametrize("topic", ["events", "web-clicks.eu"])
async def test_positions_do_not_expire_while_the_group_has_members(
    tmp_path: Path, topic: str
) -> None:
    async with group_world(tmp_path) as world:
        client = await world.client()
        await client.call(METADATA, 12, topics=[{"name": topic}], allow_auto_topic_creation=True)
        joined = await _come(client)
        await _sync(client, joined)
        assert await _commit(client, {0: 0}, topic=topic, joined=joined) == {0: ErrorCode.none}
        table = world.service.table(str(table_paths_of(topic)[0]))
        (before,) = table.readers()
        desk = world.door._broker.groups
        assert await _heartbeat(client, joined) is ErrorCode.none
        (kept,) = table.readers()
        assert kept.offsets == before.offsets
        assert kept.reported_us > before.reported_us
        # Not at every heartbeat.
        assert await _heartbeat(client, joined) is ErrorCode.none
        assert table.readers() == [kept]
        assert desk._position_topics


async def test_a_group_is_its_tokens_and_who_looks_after_the_service_sees_all(
    tmp_path: Path,
) -> None:
    grants = tmp_path / "grants.toml"
    given = {"one": ["read:*"], "two": ["read:default.events"], "none": ["read:sales.*"]}
    grants.write_text(
        "".join(
            f'[[token]]\nname = "{name}"\nsha256 = "{token_hash(name.encode())}"\n'
            f"grants = {json.dumps(granted)}\n"
            for name, granted in given.items()
        )
    )
    grants.chmod(0o600)
    async with kafka_world(tmp_path / "data", token="owner", grants_file=grants) as world:
        _begins_at_once(world)
        owner = {"authorization": "Bearer owner"}
        table = table_descriptor("events", EVENTS).to_json()
        await world.http.call("POST", "/v1/tables", json_body=table, headers=owner)

        async def client_of(token: str) -> KafkaClient:
            known = set(world.door._open)
            client = await world.client()
            await until(lambda: len(world.door._open) > len(known))
            (connection,) = world.door._open - known
            connection.token = token.encode()
            return client

        one, two = await client_of("one"), await client_of("two")
        assert await _commit(one, {0: 0}) == {0: ErrorCode.none}
        assert await _fetch(two, [0]) == {"events": {0: -1}}
        joined = await _come(one)
        assert await _state(two) == "Dead"
        assert await _heartbeat(two, joined) is ErrorCode.unknown_member_id
        assert not (await two.call(LIST, 5)).groups
        deleted = await two.call(DELETE, 2, groups_names=[GROUP])
        assert deleted.results[0].error_code is ErrorCode.group_id_not_found

        admin = await client_of("owner")
        assert await _state(admin) == "CompletingRebalance"
        assert [group.group_id for group in (await admin.call(LIST, 5)).groups] == [GROUP]
        assert await _fetch(admin) == {"events": {0: 0}}
        # Of a group that is another's it does not say where it is in the other partitions.
        asked = [{"name": "events", "partitions": [{"partition_index": 1}]}]
        await admin.call(OFFSET_DELETE, 0, group_id=GROUP, topics=asked)
        assert await _fetch(one) == {"events": {0: 0}}
        nobody = await client_of("none")
        refused = ErrorCode.topic_authorization_failed
        assert await _commit(nobody, {0: 0}) == {0: refused}
        answer = await nobody.call(
            OFFSET_FETCH,
            8,
            groups=[
                {
                    "group_id": GROUP,
                    "topics": [{"name": "events", "partition_indexes": [0]}],
                }
            ],
        )
        assert answer.groups[0].topics[0].partitions[0].error_code is refused


async def test_positions_in_tables_of_other_shards_are_kept_there(tmp_path: Path) -> None:
    shards = ShardWorld(tmp_path, MemoryStore())
    async with shards.shard("a") as a, shards.shard("b") as b:
        await b.create_table("there", bucket_count=2)
        await b.append([(0, 0, event_rows(0, 10)), (1, 0, event_rows(0, 5))], path="there")
        names = [f"g{number}" for number in range(100)]
        group_id = next(one for one in names if coordinator_of(one, ["a", "b"]) == "a")
        other_id = next(one for one in names if coordinator_of(one, ["a", "b"]) == "b")
        async with kafka_door(a) as world:
            client = await world.client()
            given = {"topic": "there", "group_id": group_id}
            assert await _commit(client, {0: 4, 1: 2}, **given) == {
                0: ErrorCode.none,
                1: ErrorCode.none,
            }
            assert await _commit(client, {0: 3}, **given) == {0: ErrorCode.none}
            assert await _commit(client, {0: 99}, **given) == {0: ErrorCode.offset_out_of_range}
            assert await _fetch(client, [0, 1], **given) == {"there": {0: 3, 1: 2}}
            assert await _fetch(client, group_id=group_id) == {"there": {0: 3, 1: 2}}
            (standing,) = b.service.table("there").readers()
            assert (standing.name, standing.offsets) == (group_id, {0: 3, 1: 2})

            moved = {"topic": "there", "group_id": other_id}
            assert await _commit(client, {0: 4}, **moved) == {0: ErrorCode.not_coordinator}
            assert await _fetch(client, [0], **moved) is ErrorCode.not_coordinator
            joined = await _join(client, group_id=other_id)
            assert joined.error_code is ErrorCode.not_coordinator

            # An answer without positions would make the group begin anew.
            del shards.services["http://b:1"]
            assert await _fetch(client, [0], **given) is _LATER
            assert await _fetch(client, group_id=group_id) is _LATER
            assert await _commit(client, {0: 4}, **given) == {0: ErrorCode.not_coordinator}
            shards.services["http://b:1"] = b
            deleted = await client.call(DELETE, 2, groups_names=[group_id])
            assert deleted.results[0].error_code is ErrorCode.none
            assert not b.service.table("there").readers()


async def test_topics_of_other_shards_have_their_own_names_among_a_groups_positions(
    tmp_path: Path,
) -> None:
    shards = ShardWorld(tmp_path, MemoryStore())
    async with shards.shard("a") as a, shards.shard("b") as b:
        await b.create_table("web_clicks", properties={"kafka.topic": "web-clicks"})
        groups = (f"g{number}" for number in range(100))
        group_id = next(one for one in groups if coordinator_of(one, ["a", "b"]) == "a")
        async with kafka_door(a) as world, kafka_door(b):
            client = await world.client()
            given = {"topic": "web-clicks", "group_id": group_id}
            assert await _commit(client, {0: 0}, **given) == {0: ErrorCode.none}

            found = await _fetch(client, group_id=group_id)

            assert found == {"web-clicks": {0: 0}}


async def test_groups_that_are_named_many_times_are_answered_once(tmp_path: Path) -> None:
    async with group_world(tmp_path) as world:
        client = await world.client()

        described = await client.call(DESCRIBE, 5, groups=[GROUP] * 2_000)
        asked = [{"group_id": GROUP, "topics": None}] * 2_000
        fetched = await client.call(OFFSET_FETCH, 8, groups=asked)
        assert [group.group_id for group in described.groups] == [GROUP]
        assert [group.group_id for group in fetched.groups] == [GROUP]


async def test_answers_about_groups_that_nobody_reads_are_bounded(tmp_path: Path) -> None:
    mib = 1 << 20
    limits = {"answers_bytes_max": 16 * mib, "fetch_bytes_max": 8 * mib}
    async with group_world(tmp_path, **limits) as world:
        member, lazy, other = [await world.client() for _ in range(3)]
        said = {"protocols": [{"name": "range", "metadata": bytes(3 * mib)}]}
        for group_id in ("a", "b", "c"):
            joined = await _come(member, group_id=group_id, **said)
            synced = await member.call(
                SYNC,
                5,
                group_id=group_id,
                generation_id=joined.generation_id,
                member_id=joined.member_id,
            )
            assert synced.error_code is ErrorCode.none

        # More than sockets take, and nobody reads it.
        lazy.reader._limit = 1
        lazy.send(DESCRIBE, 5, groups=["a", "b", "c"])
        await until(lambda: world.service.answers.held > 9 * mib)
        (refused, *_) = (await other.call(DESCRIBE, 5, groups=["a", "b", "c"])).groups
        (one,) = (await other.call(DESCRIBE, 5, groups=["none"])).groups

        assert refused.error_code is ErrorCode.not_coordinator
        assert not refused.members
        assert one.error_code is ErrorCode.none
        await lazy.close()
        await until(lambda: world.service.answers.held == 0)
