"""Groups together: bounded, each of its token, and none left over when the process stops."""

from __future__ import annotations

import pytest
from kio.schema.errors import ErrorCode

from streamhouse.storage_service.kafka.groups.coordinator import unusable_group_id
from streamhouse.storage_service.kafka.groups.messages import NO_GENERATION
from tests.support.group_world import KEY, SESSION_S, GroupWorld


def test_two_tokens_groups_of_one_name_know_nothing_of_each_other() -> None:
    world = GroupWorld()
    mine = world.stable(1)[0]
    yours = world.come(key=("you", KEY[1]))[1]
    assert (mine.generation, yours[0].generation) == (1, 1)
    assert world.heartbeat(mine, key=("you", KEY[1])) is ErrorCode.unknown_member_id
    keys = sorted(key for key, _ in world.coordinator.groups())
    assert keys == [("me", "billing"), ("you", "billing")]
    assert world.coordinator.member_count() == 2
    assert len(world.coordinator.groups_named(KEY[1])) == 2
    assert world.coordinator.groups_named("another") == []
    world.coordinator.end()
    assert world.coordinator.groups_named(KEY[1]) == []


@pytest.mark.parametrize("group_id", ["", "a b", "a/b", "é", "x" * 201])
def test_a_group_needs_a_plain_name(group_id: str) -> None:
    world = GroupWorld()
    key = ("me", group_id)
    assert world.ask_to_join(key=key).error is ErrorCode.invalid_group_id
    assert world.commit("", NO_GENERATION, key=key) is ErrorCode.invalid_group_id
    assert "is named by 1 to 200 letters" in (unusable_group_id(group_id) or "")
    assert unusable_group_id("connect-sink.1:a@b_c") is None


@pytest.mark.parametrize("session_s", [5.9, 1801.0, -1.0])
def test_a_session_is_neither_shorter_nor_longer_than_kafkas(session_s: float) -> None:
    refused = GroupWorld().ask_to_join(session_timeout_s=session_s)
    assert refused.error is ErrorCode.invalid_session_timeout


def test_a_rebalance_does_not_take_days() -> None:
    world = GroupWorld()
    first = world.stable(1, rebalance_timeout_s=1e9, session_timeout_s=1_800.0)[0]
    world.come(rebalance_timeout_s=1e9)
    assert world.group().due_s <= world.now_s + 86_400
    assert world.heartbeat(first) is ErrorCode.rebalance_in_progress


@pytest.mark.parametrize("instance_id", ["", "x" * 250])
def test_an_instance_has_a_short_name(instance_id: str) -> None:
    refused = GroupWorld().ask_to_join(instance_id=instance_id)
    assert refused.error is ErrorCode.invalid_request


def test_members_of_a_group_are_bounded_with_those_that_only_have_an_id() -> None:
    world = GroupWorld(members_max=2)
    world.stable(1)
    given = world.ask_to_join()[0].member_id
    assert world.ask_to_join().error is ErrorCode.group_max_size_reached
    assert not world.ask_to_join(given)
    assert world.ask_to_join(instance_id="one").error is ErrorCode.group_max_size_reached


def test_groups_are_bounded_and_one_token_leaves_room_for_others() -> None:
    world = GroupWorld(groups_max=4)
    for name in ("a", "b"):
        world.come(key=("me", name))
    full = ErrorCode.group_max_size_reached
    assert world.ask_to_join(key=("me", "c")).error is full
    for owner in ("you", "they"):
        world.come(key=(owner, "a"))
    assert world.ask_to_join(key=("we", "a")).error is full


def test_the_bytes_that_members_say_are_bounded_and_given_back() -> None:
    world = GroupWorld(bytes_max=40_000)
    big = {"range": b"x" * 15_000}
    joined = world.come(protocols=big)[1][0]
    full = ErrorCode.group_max_size_reached
    assert world.ask_to_join(protocols=big).error is full
    assert world.sync(joined, {joined.member_id: b"x" * 6_000}).error is full
    assert world.come(key=("you", "a"), protocols=big)[1]
    assert world.ask_to_join(key=("they", "a"), protocols=big).error is full
    world.leave(joined.member_id)
    assert world.come(protocols=big)[1][0].generation == 1


def test_ids_that_nobody_joins_with_and_members_that_say_nothing_count_as_bytes() -> None:
    world = GroupWorld(bytes_max=40_000)
    errors = [world.ask_to_join(key=("me", f"g{n}")).error for n in range(100)]
    assert 10 < errors.count(ErrorCode.member_id_required) <= 50
    assert errors[-1] is ErrorCode.group_max_size_reached
    world.pass_time(SESSION_S + 1)

    joins = [world.ask_to_join(instance_id=f"i{n}", protocols={"a": b""}) for n in range(100)]
    refused = [join for join in joins if join and join.error is ErrorCode.group_max_size_reached]
    assert 10 < len(joins) - len(refused) < 20


def test_a_member_has_few_protocols() -> None:
    world = GroupWorld()
    assert world.come(protocols={f"p{n}": b"" for n in range(20)})[1]
    refused = world.ask_to_join(protocols={f"p{n}": b"" for n in range(21)})
    assert refused.error is ErrorCode.invalid_request


def test_what_is_waited_for_often_is_remembered_once() -> None:
    world = GroupWorld()
    joined = world.stable(1)[0]
    for _ in range(1_000):
        world.pass_time(0.5)
        joined = world.ask_to_join(joined.member_id, protocols={"range": b"%d" % _})[0]
    assert len(world.coordinator._wakes) <= 12


def test_a_process_that_coordinates_no_more_ends_every_wait() -> None:
    world = GroupWorld()
    first = world.stable(1)[0]
    _, waiting = world.come()
    syncing = world.come(key=("me", "other"))[1][0]
    follower = world.ask_to_join(key=("me", "other"))
    world.coordinator.end()

    gone = ErrorCode.not_coordinator
    assert waiting.error is gone
    assert follower.error is ErrorCode.member_id_required
    assert world.heartbeat(first) is gone
    assert world.commit("", NO_GENERATION) is gone
    assert world.leave(first.member_id) is gone
    assert world.ask_to_join().error is gone
    assert world.sync(syncing, key=("me", "other")).error is gone
    assert world.coordinator.due_s() == float("inf")
