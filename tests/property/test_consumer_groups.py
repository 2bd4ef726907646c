"""Members that come, stall, start anew and go in any order: one generation at a time is valid."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kio.schema.errors import ErrorCode

from streamhouse.storage_service.kafka.groups.group import GroupState
from streamhouse.storage_service.kafka.groups.messages import NO_GENERATION, JoinAnswer
from tests.support.group_world import KEY, Answers, GroupWorld

_PROCESSES = 5
_LONG_S = 10_000.0
_AGAIN = (ErrorCode.rebalance_in_progress, ErrorCode.member_id_required)


@dataclass
class Process:
    """What one process of the application knows, as a client library would."""

    instance_id: str | None = None
    member_id: str = ""
    said: int = 0
    joined: JoinAnswer | None = None
    join: Answers | None = None
    sync: Answers | None = None
    is_synced: bool = False
    is_stale: bool = False
    heard: list[JoinAnswer] = field(default_factory=list)
    """All generations that it was in: a request can be late."""


@dataclass
class Generation:
    """What anybody was told of one generation."""

    leader: str
    protocol: str | None
    members: set[str] | None = None
    assigned: dict[str, bytes] | None = None
    got: dict[str, bytes] = field(default_factory=dict)


class Group(RuleBasedStateMachine):
    """The model is what the processes were told; it knows nothing of states."""

    def __init__(self) -> None:
        super().__init__()
        self.world = GroupWorld(initial_delay_s=2.0, members_max=8)
        self.processes = [Process("static" if i == 0 else None) for i in range(_PROCESSES)]
        self.generations: dict[int, Generation] = {}
        self.waits: list[Answers] = []
        self.base = 0
        """A group that everybody has left is another one when somebody comes: it counts anew."""

    # -- what processes do -----------------------------------------------------------------------

    @rule(number=st.integers(0, _PROCESSES - 1), change=st.booleans(), is_old=st.booleans())
    def join(self, number: int, change: bool, is_old: bool) -> None:
        process = self.processes[number]
        process.said += change
        process.join = self.world.ask_to_join(
            process.member_id,
            instance_id=process.instance_id,
            protocols={"range": b"%d" % process.said, f"own-{number}": b""},
            requires_member_id=not is_old,
            can_skip=not is_old,
        )
        self.waits.append(process.join)
        process.is_stale = False
        if process.join and process.join.error is ErrorCode.member_id_required:
            process.member_id = process.join[0].member_id
            if not change:
                self.join(number, change, is_old)

    @rule(numbers=st.lists(st.integers(0, _PROCESSES - 1), min_size=1, max_size=12))
    def go_on(self, numbers: list[int]) -> None:
        """Each does what a client library does next."""
        for number in numbers:
            process = self.processes[number]
            if process.joined is None or process.is_stale:
                self.join(number, change=False, is_old=False)
            elif process.sync is None and not process.is_synced:
                self.sync(number, is_lazy=False)
            else:
                self.heartbeat(number)
            self.all_are_told_the_same()

    @rule(number=st.integers(0, _PROCESSES - 1), is_lazy=st.booleans())
    def sync(self, number: int, is_lazy: bool) -> None:
        """The leader assigns to all but, if it `is_lazy`, itself."""
        process = self.processes[number]
        joined = process.joined
        if joined is None:
            return
        assigned = {
            one.identity.member_id: f"{joined.generation}:{one.identity.member_id}".encode()
            for one in joined.members
            if not (is_lazy and one.identity.member_id == joined.member_id)
        }
        group = self.world.coordinator.group(KEY)
        is_first = group is not None and group.state is GroupState.COMPLETING
        process.sync = self.world.sync(joined, assigned, instance_id=process.instance_id)
        process.sync.generation = joined.generation  # type: ignore[attr-defined]
        self.waits.append(process.sync)
        leads = joined.leader == joined.member_id
        if is_first and leads and process.sync and process.sync.error is ErrorCode.none:
            generation = self.generations[self.base + joined.generation]
            assert generation.assigned is None, "a generation is assigned once"
            generation.assigned = assigned

    @rule(number=st.integers(0, _PROCESSES - 1))
    def heartbeat(self, number: int) -> None:
        process = self.processes[number]
        if process.joined is None:
            return
        who = {"instance_id": process.instance_id} if process.instance_id else {}
        error = self.world.heartbeat(process.joined, **who)
        if error in (ErrorCode.unknown_member_id, ErrorCode.fenced_instance_id):
            process.joined, process.member_id = None, ""
        process.is_stale = error is ErrorCode.rebalance_in_progress

    @rule(number=st.integers(0, _PROCESSES - 1), late=st.integers(0, 3))
    def commit(self, number: int, late: int) -> None:
        heard = self.processes[number].heard[: -late or None]
        if not heard:
            return
        joined = heard[-1]
        if self.world.commit(joined.member_id, joined.generation) is not ErrorCode.none:
            return
        newest = max(self.generations)
        assert self.base + joined.generation == newest, "an old generation commits nothing"
        # Where the next generation is being made before this one was assigned, nobody got anything.
        is_next_made = self.world.group().state is GroupState.PREPARING
        assert self.generations[newest].assigned is not None or is_next_made

    @rule()
    def commit_alone(self) -> None:
        if self.world.commit("", NO_GENERATION) is ErrorCode.none:
            group = self.world.coordinator.group(KEY)
            assert group is None or not group.members()

    @rule(number=st.integers(0, _PROCESSES - 1))
    def leave(self, number: int) -> None:
        process = self.processes[number]
        if process.member_id:
            self.world.leave(process.member_id, process.instance_id)
        process.joined, process.member_id = None, ""

    @rule(number=st.integers(0, _PROCESSES - 1))
    def die(self, number: int) -> None:
        """It starts anew and knows nothing; its connections are closed."""
        process = self.processes[number]
        for wait in (process.join, process.sync):
            if wait is not None and not wait:
                self.world.coordinator.abandon_wait(KEY, process.member_id, wait)
                self.waits.remove(wait)
        self.processes[number] = Process(process.instance_id, said=process.said)

    @rule(number=st.integers(0, _PROCESSES - 1))
    def stall(self, number: int) -> None:
        """It starts anew, and its connections look as if it were there."""
        process = self.processes[number]
        self.processes[number] = Process(process.instance_id, said=process.said)

    @rule(seconds=st.sampled_from([0.5, 2.5, 9.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    def teardown(self) -> None:
        """Nobody waits for ever: neither while the others are there, nor when all are gone."""
        for _ in range(30):
            self.world.pass_time(5)
            for number in range(_PROCESSES):
                self.heartbeat(number)
        assert all(self.waits), "whoever does not do its part is gone after a rebalance or two"
        self.world.pass_time(_LONG_S)
        assert self.world.coordinator.group(KEY) is None, "all sessions have ended"

    # -- what they were told ---------------------------------------------------------------------

    @invariant()
    def all_are_told_the_same(self) -> None:
        for process in self.processes:
            self._hear_joined(process)
        for process in self.processes:
            self._hear_synced(process)
        self.waits = [wait for wait in self.waits if not wait]
        if self.world.coordinator.group(KEY) is None:
            self.base = max(self.generations, default=0)

    def _hear_joined(self, process: Process) -> None:
        if not process.join:
            return
        answer: JoinAnswer = process.join[0]
        process.join = None
        if answer.error is not ErrorCode.none:
            process.joined = None
            process.member_id = answer.member_id if answer.error in _AGAIN else ""
            return
        process.joined, process.member_id = answer, answer.member_id
        process.heard.append(answer)
        process.is_synced = False
        known = self.generations.setdefault(
            self.base + answer.generation, Generation(answer.leader, answer.protocol)
        )
        assert known.protocol == answer.protocol
        if answer.members and not answer.is_assigned:
            members = {one.identity.member_id for one in answer.members}
            assert answer.leader == answer.member_id in members
            assert known.members in (None, members), "a generation has one list of members"
            known.members = members

    def _hear_synced(self, process: Process) -> None:
        if not process.sync:
            return
        answer = process.sync[0]
        number: int = process.sync.generation  # type: ignore[attr-defined]
        process.sync = None
        if answer.error is not ErrorCode.none or process.joined is None:
            return
        process.is_synced = True
        generation = self.generations[self.base + number]
        assert generation.assigned is not None, "nobody has an assignment before the leader's"
        if process.instance_id is None:
            wanted = generation.assigned.get(process.joined.member_id, b"")
            assert answer.assignment == wanted
        before = generation.got.setdefault(process.joined.member_id, answer.assignment)
        assert before == answer.assignment

    @invariant()
    def time_is_asked_for_while_somebody_waits(self) -> None:
        group = self.world.coordinator.group(KEY)
        if group is not None:
            assert self.world.coordinator.due_s() <= group.due_s < float("inf")


TestGroup = Group.TestCase
