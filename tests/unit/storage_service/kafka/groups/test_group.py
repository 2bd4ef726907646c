"""One consumer group: what each call is answered in each state, as Kafka's coordinator does."""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from streamhouse.storage_service.kafka.groups.group import GroupState
from streamhouse.storage_service.kafka.groups.messages import NO_GENERATION, JoinAnswer
from tests.support.group_world import KEY, REBALANCE_S, SESSION_S, GroupWorld


def test_a_lone_member_leads_its_generation_and_gets_what_it_assigned() -> None:
    world = GroupWorld()
    member_id, wait = world.come()

    joined: JoinAnswer = wait[0]
    assert (joined.generation, joined.leader, joined.protocol) == (1, member_id, "range")
    assert [(m.identity.member_id, m.metadata) for m in joined.members] == [(member_id, b"t")]
    assert world.group().state is GroupState.COMPLETING
    assert world.assign(joined) == {member_id: f"for {member_id}".encode()}
    assert world.group().state is GroupState.STABLE
    assert world.heartbeat(joined) is ErrorCode.none


def test_an_empty_group_waits_for_more_members_a_little_and_no_longer_than_they_bear() -> None:
    world = GroupWorld(initial_delay_s=3.0)
    first = world.come(rebalance_timeout_s=7.0)[1]
    world.pass_time(2)
    second = world.come(rebalance_timeout_s=7.0)[1]
    world.pass_time(2)
    assert not first
    assert not second
    third = world.come(rebalance_timeout_s=7.0)[1]
    world.pass_time(2.5)
    assert not first
    world.pass_time(1)

    answers: list[JoinAnswer] = [first[0], second[0], third[0]]
    assert [one.generation for one in answers] == [1, 1, 1]
    assert [len(one.members) for one in answers] == [3, 0, 0]


def test_a_member_that_comes_makes_the_others_join_again_and_takes_a_share() -> None:
    world = GroupWorld()
    (first,) = world.stable(1)
    second_id, second = world.come()
    assert not second
    assert world.heartbeat(first) is ErrorCode.rebalance_in_progress
    assert world.commit(first.member_id, 1) is ErrorCode.none
    assert world.sync(first).error is ErrorCode.rebalance_in_progress
    again = world.ask_to_join(first.member_id)

    assert (again[0].generation, second[0].generation) == (2, 2)
    assert {m.identity.member_id for m in again[0].members} == {first.member_id, second_id}
    assert world.commit(first.member_id, 2) is ErrorCode.rebalance_in_progress
    waiting = world.sync(second[0])
    assert not waiting
    assert world.heartbeat(again[0]) is ErrorCode.none
    world.sync(again[0], {second_id: b"its"})
    assert waiting[0].assignment == b"its"
    # Whoever the leader forgot has nothing; who asks twice is answered the same.
    assert world.sync(again[0])[0].assignment == b""
    assert world.commit(first.member_id, 1) is ErrorCode.illegal_generation
    assert world.commit(first.member_id, 2) is ErrorCode.none


def test_who_does_not_join_again_in_time_is_no_member_any_more() -> None:
    world = GroupWorld()
    first, gone = world.stable(2)
    _, third = world.come()
    again = world.ask_to_join(first.member_id)
    for _ in range(int(REBALANCE_S / 5)):
        assert not again
        world.heartbeat(gone)
        world.pass_time(5)

    assert again[0].generation == third[0].generation == 3
    assert {m.identity.member_id for m in again[0].members} == {first.member_id, third[0].member_id}
    assert world.heartbeat(gone) is ErrorCode.unknown_member_id
    assert world.ask_to_join(gone.member_id).error is ErrorCode.unknown_member_id


def test_who_is_silent_for_its_session_is_gone_and_an_empty_group_is_forgotten() -> None:
    world = GroupWorld()
    first, gone = world.stable(2)
    world.pass_time(SESSION_S - 1)
    assert world.heartbeat(first) is ErrorCode.none
    world.pass_time(1.5)
    assert world.heartbeat(first) is ErrorCode.rebalance_in_progress
    assert world.heartbeat(gone) is ErrorCode.unknown_member_id
    assert world.ask_to_join(first.member_id)[0].generation == 3

    world.pass_time(2 * SESSION_S)
    assert world.coordinator.group(KEY) is None
    assert world.coordinator.due_s() == float("inf")


def test_who_never_syncs_is_gone_so_that_the_others_do_not_wait_for_its_assignment() -> None:
    world = GroupWorld()
    leader = world.come()[1]
    second_id, second = world.come()
    leader = world.ask_to_join(leader[0].member_id)
    waiting = world.sync(second[0])
    for _ in range(int(REBALANCE_S / 5)):
        assert not waiting
        assert world.heartbeat(leader[0]) is ErrorCode.none
        world.pass_time(5)

    assert waiting.error is ErrorCode.rebalance_in_progress
    again = world.ask_to_join(second_id)
    assert (again[0].leader, again[0].generation) == (second_id, 3)


def test_members_that_leave_are_gone_at_once() -> None:
    world = GroupWorld()
    first, second = world.stable(2)
    assert world.leave(second.member_id) is ErrorCode.none
    assert world.leave(second.member_id) is ErrorCode.unknown_member_id
    assert world.heartbeat(first) is ErrorCode.rebalance_in_progress
    again = world.ask_to_join(first.member_id)
    assert again[0].generation == 3
    given = world.ask_to_join()
    assert world.leave(given[0].member_id) is ErrorCode.none
    assert world.leave(first.member_id) is ErrorCode.none
    assert world.coordinator.group(KEY) is None
    assert world.leave(first.member_id) is ErrorCode.unknown_member_id


def test_an_id_that_was_given_and_not_used_is_forgotten_after_a_session() -> None:
    world = GroupWorld()
    first = world.stable(1)[0]
    given = world.ask_to_join()[0].member_id
    # As long as it may join, the next generation waits for it.
    again = world.ask_to_join(first.member_id)
    assert not again
    world.pass_time(SESSION_S)
    assert again[0].generation == 2
    assert world.ask_to_join(given).error is ErrorCode.unknown_member_id


def test_a_client_of_before_ids_were_given_first_joins_at_once() -> None:
    world = GroupWorld()
    wait = world.ask_to_join(requires_member_id=False)
    assert wait[0].member_id == wait[0].leader == "app-1"


def test_a_new_member_that_waits_for_very_long_is_let_go() -> None:
    world = GroupWorld()
    first = world.stable(1, rebalance_timeout_s=1_000.0)[0]
    _, second = world.come(rebalance_timeout_s=1_000.0)
    for _ in range(60):
        assert not second
        world.heartbeat(first)
        world.pass_time(5)
    world.pass_time(1)
    assert second.error is ErrorCode.unknown_member_id


def test_what_has_not_changed_is_answered_with_the_generation_there_is() -> None:
    world = GroupWorld()
    leader, second = world.stable(2)
    assert world.ask_to_join(second.member_id)[0] == second
    assert world.group().state is GroupState.STABLE
    # A leader that joins wants a new assignment.
    again = world.ask_to_join(leader.member_id)
    assert not again
    assert world.ask_to_join(second.member_id)[0].generation == 3
    assert world.ask_to_join(leader.member_id)[0] == again[0]
    assert again[0].members
    assert world.group().state is GroupState.COMPLETING
    # And so does one that says something else.
    changed = world.ask_to_join(second.member_id, protocols={"range": b"other"})
    assert not changed
    assert world.group().state is GroupState.PREPARING


def test_the_protocol_is_what_most_like_best_of_what_all_can_do() -> None:
    world = GroupWorld(initial_delay_s=1.0)
    waits = [
        world.come(protocols=dict.fromkeys(names, b""))[1]
        for names in (("a", "b", "c"), ("b", "c"), ("c", "b", "d"), ("b", "c", "a"))
    ]
    world.pass_time(10)
    assert {wait[0].protocol for wait in waits} == {"b"}
    for given in ({"protocols": {"a": b""}}, {"protocols": {}}, {"protocol_type": "connect"}):
        refused = world.ask_to_join(**({"protocols": {"b": b""}} | given))
        assert refused.error is ErrorCode.inconsistent_group_protocol
    other = GroupWorld()
    assert other.ask_to_join(protocols={}).error is ErrorCode.inconsistent_group_protocol
    assert other.ask_to_join(protocol_type="").error is ErrorCode.inconsistent_group_protocol


def test_a_sync_of_another_protocol_is_refused() -> None:
    world = GroupWorld()
    joined = world.come()[1][0]
    wrong = ErrorCode.inconsistent_group_protocol
    assert world.sync(joined, protocol_type="connect").error is wrong
    assert world.sync(joined, protocol="other").error is wrong
    right = world.sync(joined, {}, protocol="range", protocol_type="consumer")
    assert (right[0].protocol, right[0].protocol_type) == ("range", "consumer")


def test_what_all_members_have_follows_those_that_change_start_anew_and_go() -> None:
    world = GroupWorld()
    one = world.ask_to_join(instance_id="one", protocols={"a": b"", "b": b""})[0]
    world.assign(one)
    changed = world.ask_to_join(one.member_id, instance_id="one", protocols={"b": b"", "c": b""})
    assert changed[0].protocol == "b"
    refused = ErrorCode.inconsistent_group_protocol
    assert world.ask_to_join(protocols={"a": b""}).error is refused

    anew = world.ask_to_join(instance_id="one", protocols={"c": b"", "d": b""})
    assert anew[0].protocol == "c"
    assert world.ask_to_join(protocols={"b": b""}).error is refused

    two_id, two = world.come(protocols={"d": b"", "e": b""})
    again = world.ask_to_join(anew[0].member_id, instance_id="one", protocols={"c": b"", "d": b""})
    assert again[0].protocol == two[0].protocol == "d"
    assert world.ask_to_join(protocols={"c": b""}).error is refused
    world.leave(two_id)
    assert world.ask_to_join(protocols={"c": b""}).error is ErrorCode.member_id_required


def test_a_static_member_starts_anew_without_disturbing_the_others() -> None:
    world = GroupWorld()
    first = world.ask_to_join(instance_id="one")[0]
    second = world.ask_to_join(instance_id="two")
    first = world.ask_to_join(first.member_id, instance_id="one")[0]
    waiting = world.sync(second[0], instance_id="two")
    world.sync(first, {second[0].member_id: b"its"}, instance_id="one")
    assert waiting[0].assignment == b"its"

    anew = world.ask_to_join(instance_id="two")[0]
    assert anew.member_id != second[0].member_id
    assert anew.generation == first.generation
    assert world.sync(anew, instance_id="two")[0].assignment == b"its"
    assert world.heartbeat(first, instance_id="one") is ErrorCode.none
    fenced = ErrorCode.fenced_instance_id
    assert world.heartbeat(second[0], instance_id="two") is fenced
    assert world.sync(second[0], instance_id="two").error is fenced
    assert world.ask_to_join(second[0].member_id, instance_id="two").error is fenced
    assert world.leave(second[0].member_id, "two") is fenced
    assert world.heartbeat(second[0]) is ErrorCode.unknown_member_id

    # The leader has its assignment, and knows the members still.
    leader = world.ask_to_join(instance_id="one")[0]
    assert leader.is_assigned
    assert leader.leader == leader.member_id
    assert len(leader.members) == 2
    older = world.ask_to_join(instance_id="one", can_skip=False)[0]
    assert older.leader != older.member_id
    assert not older.members
    # An operator names it without an id.
    assert world.leave("", "one") is ErrorCode.none
    assert world.leave("", "one") is ErrorCode.unknown_member_id
    assert world.ask_to_join(anew.member_id, instance_id="two")[0].generation == 3


def test_a_static_member_that_starts_anew_in_a_rebalance_joins_it() -> None:
    world = GroupWorld()
    first = world.ask_to_join(instance_id="one")
    waiting = world.ask_to_join(first[0].member_id, instance_id="one", protocols={"range": b"2"})
    assert waiting[0].generation == 2
    anew = world.ask_to_join(instance_id="one")
    assert (anew[0].generation, anew[0].leader) == (3, anew[0].member_id)

    world.assign(anew[0])
    _, second = world.come()
    old = world.ask_to_join(instance_id="one", protocols={"range": b"3"})
    assert old[0].generation == second[0].generation == 4
    assert old[0].leader == old[0].member_id


def test_a_wait_that_the_same_static_member_takes_over_is_fenced() -> None:
    world = GroupWorld(initial_delay_s=1.0)
    old = world.ask_to_join(instance_id="one")
    new = world.ask_to_join(instance_id="one")
    assert old.error is ErrorCode.fenced_instance_id
    world.pass_time(2)
    assert new[0].generation == 1


def test_static_members_that_do_not_join_again_are_waited_for_until_their_sessions_end() -> None:
    world = GroupWorld()
    one = world.ask_to_join(instance_id="one", rebalance_timeout_s=2.0)[0]
    world.assign(one)
    _, dynamic = world.come(rebalance_timeout_s=2.0)
    world.pass_time(3)
    # The generation began without it, but it is a member still, and not its leader.
    assert (dynamic[0].generation, dynamic[0].leader) == (2, dynamic[0].member_id)
    assert len(dynamic[0].members) == 2
    world.assign(dynamic[0])
    world.leave(dynamic[0].member_id)
    assert world.group().state is GroupState.PREPARING
    world.pass_time(SESSION_S)
    assert world.coordinator.group(KEY) is None


def test_a_group_of_which_nobody_has_joined_is_looked_at_when_sessions_end_and_not_before() -> None:
    world = GroupWorld()
    world.assign(world.ask_to_join(instance_id="one", rebalance_timeout_s=0.0)[0])
    member_id, _ = world.come(rebalance_timeout_s=0.0)
    world.leave(member_id)

    looks, end_s = list[float](), world.now_s + SESSION_S
    while world.coordinator.due_s() < end_s and len(looks) < 10:
        looks.append(world.coordinator.due_s())
        world.now_s = max(world.now_s, looks[-1])
        world.coordinator.tick()

    assert len(looks) == 1
    assert world.group().state is GroupState.PREPARING
    world.pass_time(SESSION_S)
    assert world.coordinator.group(KEY) is None


def test_who_joins_a_group_of_which_nobody_had_joined_waits_as_long_as_for_any_generation() -> None:
    world = GroupWorld(initial_delay_s=1.0)
    names = ("one", "two", "three")
    waits = [world.ask_to_join(instance_id=one, rebalance_timeout_s=3.0) for one in names]
    world.pass_time(3)
    world.assign(*(wait[0] for wait in waits))
    world.leave("", "three")
    world.pass_time(4)
    one = world.ask_to_join(instance_id="one", rebalance_timeout_s=3.0)

    world.pass_time(2.9)
    assert not one
    world.pass_time(0.2)

    assert (one.error, one[0].generation) == (ErrorCode.none, 2)


def test_a_member_that_is_gone_does_not_lead_the_next_generation() -> None:
    world = GroupWorld()
    first, second = world.stable(2)
    world.assign(first, second)
    said = {"range": b"other"}
    world.coordinator.abandon_wait(
        KEY, first.member_id, world.ask_to_join(first.member_id, protocols=said)
    )
    again = world.ask_to_join(second.member_id)
    assert (again[0].leader, len(again[0].members)) == (second.member_id, 2)


def test_a_generation_lasts_long_enough_for_its_members_to_be_told() -> None:
    world = GroupWorld()
    joined = world.come(rebalance_timeout_s=0.0)[1][0]
    world.pass_time(0.9)
    assert world.sync(joined, {joined.member_id: b"its"}).error is ErrorCode.none


def test_who_asks_again_on_another_connection_ends_its_first_wait() -> None:
    world = GroupWorld()
    first = world.stable(1)[0]
    member_id, connection_lost = world.come()
    repeated = world.ask_to_join(member_id)
    assert connection_lost.error is ErrorCode.rebalance_in_progress
    world.ask_to_join(first.member_id)
    lost_sync = world.sync(repeated[0])
    again = world.sync(repeated[0])
    assert lost_sync.error is ErrorCode.rebalance_in_progress
    assert not again


def test_a_member_whose_connection_is_gone_is_believed_for_its_session() -> None:
    world = GroupWorld()
    first, second = world.stable(2)
    world.assign(first, second)
    world.coordinator.connection_lost(KEY, second.member_id)
    world.pass_time(SESSION_S - 1)
    assert world.heartbeat(first) is ErrorCode.none
    assert world.heartbeat(second) is ErrorCode.none

    world.coordinator.connection_lost(KEY, second.member_id)
    for _ in range(2):
        world.pass_time(SESSION_S - 1)
        assert world.heartbeat(first) in (ErrorCode.none, ErrorCode.rebalance_in_progress)
    assert world.heartbeat(second) is ErrorCode.unknown_member_id


def test_a_new_member_that_is_gone_before_its_first_generation_is_waited_for_by_nobody() -> None:
    world = GroupWorld()
    first = world.stable(1)[0]
    for _ in range(3):
        given = world.ask_to_join()[0].member_id
        world.coordinator.connection_lost(KEY, given)
        member_id, wait = world.come()
        world.coordinator.connection_lost(KEY, member_id)
        world.coordinator.abandon_wait(KEY, "", wait)
    again = world.ask_to_join(first.member_id)
    assert [m.identity.member_id for m in again[0].members] == [first.member_id]


def test_a_member_that_joined_again_counts_as_joined_though_its_connection_is_gone() -> None:
    world = GroupWorld()
    first, second = world.stable(2)
    world.assign(first, second)
    waiting = world.ask_to_join(second.member_id, protocols={"range": b"other"})
    world.coordinator.abandon_wait(KEY, second.member_id, waiting)
    again = world.ask_to_join(first.member_id)
    assert {m.identity.member_id for m in again[0].members} == {first.member_id, second.member_id}
    assert not waiting

    # It may still come back, and is in the generation.
    back = world.ask_to_join(second.member_id, protocols={"range": b"other"})
    assert back[0].generation == again[0].generation
    assert world.assign(again[0], back[0])[second.member_id]


def test_a_generation_waits_a_third_of_a_session_for_a_member_whose_connection_is_gone() -> None:
    world = GroupWorld()
    first, second = world.stable(2)
    world.assign(first, second)
    world.coordinator.connection_lost(KEY, second.member_id)
    third_id, third = world.come()
    again = world.ask_to_join(first.member_id)
    world.pass_time(SESSION_S / 3 - 0.1)
    assert not third
    assert not again
    world.pass_time(0.2)
    assert {m.identity.member_id for m in again[0].members} == {first.member_id, third_id}
    assert third.error is ErrorCode.none


def test_a_generation_waits_for_a_member_that_comes_back_by_another_connection() -> None:
    world = GroupWorld()
    first, second = world.stable(2)
    world.assign(first, second)
    world.coordinator.connection_lost(KEY, second.member_id)
    world.come()
    again = world.ask_to_join(first.member_id)
    assert world.heartbeat(second) is ErrorCode.rebalance_in_progress
    world.pass_time(SESSION_S - 1)
    assert not again
    world.ask_to_join(second.member_id)
    assert len(again[0].members) == 3


def test_a_static_member_whose_connection_is_gone_has_its_whole_session() -> None:
    world = GroupWorld()
    first = world.stable(1)[0]
    wait = world.ask_to_join(instance_id="static")
    again = world.ask_to_join(first.member_id)
    static = wait[0]
    world.sync(static, instance_id="static")
    world.coordinator.connection_lost(KEY, static.member_id)
    world.come()
    again = world.ask_to_join(first.member_id)
    world.pass_time(SESSION_S - 1)
    assert not again


def test_positions_without_a_group_are_taken_while_nobody_is_in_it() -> None:
    world = GroupWorld()
    assert world.commit("", NO_GENERATION) is ErrorCode.none
    assert world.commit("app-7", 3) is ErrorCode.illegal_generation
    given = world.ask_to_join()[0].member_id
    assert world.commit("", NO_GENERATION) is ErrorCode.none
    world.leave(given)
    joined = world.stable(1)[0]
    assert world.commit("", NO_GENERATION) is ErrorCode.unknown_member_id
    assert world.commit(joined.member_id, joined.generation) is ErrorCode.none
    assert world.commit("other", joined.generation) is ErrorCode.unknown_member_id


def test_commits_count_as_signs_of_life() -> None:
    world = GroupWorld()
    joined = world.stable(1)[0]
    for _ in range(3):
        world.pass_time(SESSION_S - 1)
        assert world.commit(joined.member_id, joined.generation) is ErrorCode.none
    assert world.heartbeat(joined) is ErrorCode.none


def test_a_group_shows_what_its_members_said_and_got_while_it_is_stable() -> None:
    world = GroupWorld()
    joined = world.stable(1)[0]
    (shown,) = world.group().members()
    assert (shown.metadata, shown.assignment) == (b"t", f"for {joined.member_id}".encode())
    assert (shown.client_id, shown.client_host) == ("app", "/127.0.0.1")
    world.ask_to_join(joined.member_id, protocols={"range": b"new"})
    (shown,) = world.group().members()
    assert (shown.metadata, shown.assignment) == (b"", b"")
