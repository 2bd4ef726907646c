"""The directory against a store that delays, refuses, loses answers and lists stale.

Whatever happens, a name is of one shard's table at most, an id is used once, and what crashes leave
is put right when the shards start again.
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.ownership.shards.directory import ShardDirectory
from streamhouse.storage_service.ownership.shards.entries import NameState
from tests.support.directory_world import DirectoryWorld, Fate

_SHARDS = ("a", "b", "c")
_PATHS = (TablePath("default", "x"), TablePath("default", "y"))

_FATES = st.sampled_from([Fate.DONE] * 12 + [fate for fate in Fate if fate is not Fate.DONE])
_STEPS = st.one_of(
    # Most steps let somebody go on.
    *[st.tuples(st.just("go on"), st.integers(0, 9), _FATES)] * 5,
    st.tuples(st.just("create"), st.sampled_from(_SHARDS), st.sampled_from(_PATHS)),
    st.tuples(st.just("drop"), st.sampled_from(_SHARDS), st.sampled_from(_PATHS)),
    st.tuples(st.just("take over"), st.sampled_from(_SHARDS), st.none()),
    st.tuples(st.just("arrive"), st.integers(0, 9), st.none()),
)


def _act(world: DirectoryWorld, what: str, who: object, how: object) -> None:
    match what, who, how:
        case "go on", int(number), Fate() as fate:
            running = [process for process in world.processes if process.is_running]
            if running:
                running[number % len(running)].step(fate)
        case "create" | "drop", str(shard), TablePath() as path:
            owner = world.owner[shard]
            if owner.is_dead:
                owner = world.take_over(shard)
            if not owner.is_running:
                owner.begin(lambda: getattr(owner, what)(path))
        case "take over", str(shard), None:
            world.take_over(shard)
        case "arrive", int(number), None:
            if world.late:
                world.arrive(number % len(world.late))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(_STEPS, min_size=20, max_size=150))
def test_a_name_is_of_one_shard_and_an_id_of_one_table(
    steps: list[tuple[str, object, object]],
) -> None:
    world = DirectoryWorld(_SHARDS)
    for process in world.processes:
        process.finish()
    for what, who, how in steps:
        _act(world, what, who, how)
        world.check()
        assert not world.bugs, world.bugs
    world.settle()
    _check_settled(world)


def _check_settled(world: DirectoryWorld) -> None:
    """Names are held for tables and nothing else, and whatever nobody has can be made."""
    tables = {
        path: (shard, table_id)
        for shard, state in world.durable.items()
        for path, table_id in state.tables.items()
    }
    asker = world.owner["a"]
    held = {}
    asker.begin(lambda: held.update(asker.directory.entries()))
    asker.finish()
    assert {
        path: (entry.shard, entry.table_id)
        for path, entry in held.items()
        if entry.state is NameState.HELD
    } == tables
    for path in _PATHS:
        maker = world.owner["b"]
        maker.begin(lambda maker=maker, path=path: maker.create(path))
        maker.finish()
        assert not world.bugs, world.bugs
        assert sum(path in state.tables for state in world.durable.values()) == 1


def test_a_start_that_was_passed_over_releases_no_name_of_its_successor() -> None:
    """The name is one that the shard had before: a start looks at it, and has no such table."""
    world = DirectoryWorld(["a"])
    path = TablePath("default", "events")
    first = world.owner["a"]
    first.finish()
    for operation in (first.create, first.drop):
        first.begin(lambda operation=operation: operation(path))
        first.finish()
    passed_over = world.take_over("a")
    successor = world.take_over("a")
    successor.finish()
    successor.begin(lambda: successor.create(path))
    successor.finish()

    passed_over.finish()

    assert passed_over.is_dead
    entry = ShardDirectory(world.store, shard="a").entry(path)
    assert (entry.shard, entry.table_id) == ("a", successor.state.tables[path])


def test_a_start_releases_what_a_crash_has_left_held() -> None:
    world = DirectoryWorld(["a"])
    path = TablePath("default", "events")
    owner = world.owner["a"]
    owner.finish()
    owner.begin(lambda: owner.create(path))
    while world.store.get("tables/default/events/00000001") is None:
        owner.step(Fate.DONE)
    owner.step(Fate.CRASH)

    again = world.take_over("a")
    again.finish()

    again.begin(lambda: again.create(path))
    again.finish()
    assert path in again.state.tables
