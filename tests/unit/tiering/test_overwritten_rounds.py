"""Rounds of log tables that are overwritten: the lake has all old rows or all new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from streamhouse.client import TieringIdle
from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.reading.options.options import BATCH, read_options
from streamhouse.reading.plan.batch_read import plan_batch_read
from streamhouse.reading.plan.scan_schema import output_columns
from streamhouse.tiering.round._round import BATCH_STEPS, ROUND_STEPS
from tests.support.tiering_world import SCHEMA, Killed, dying_at, rows
from tests.support.union_world import UnionWorld

PATH = UnionWorld.PATH
SORT = {"table.datalake.batch-layout.sort": "id"}


def opened(folder: Path, **properties: str) -> Iterator[UnionWorld]:
    with UnionWorld(folder) as made:
        made.tiering.create_table(
            PATH, SCHEMA, bucket_count=2, bucket_key=["id"], properties=properties
        )
        made.append(0, rows(0, 5))
        made.append(1, rows(100, 7))
        made.tiering.tier()
        made.append(0, rows(200, 3))
        yield made


@pytest.fixture
def world(tmp_path: Path) -> Iterator[UnionWorld]:
    yield from opened(tmp_path)


@pytest.fixture
def laid_out(tmp_path: Path) -> Iterator[UnionWorld]:
    """As `world`, of a table with a batch layout."""
    yield from opened(tmp_path, **SORT)


def replaced(world: UnionWorld) -> None:
    world.overwrite()
    world.append(1, rows(300, 4))


def ids_read(world: UnionWorld) -> list[int]:
    return sorted(world.read().column("id").to_pylist())


def ids_read_by_layout(world: UnionWorld) -> list[list[int]]:
    return [sorted(found.column("id").to_pylist()) for found in world.read_layouts()]


def lake_tables(world: UnionWorld) -> list[str]:
    """The rows' own, and the batch layout's if there is one."""
    is_laid_out = world.state().table.properties().has_batch_layout
    roles = [LakeRole.ROWS, LakeRole.BATCH] if is_laid_out else [LakeRole.ROWS]
    return [role.lake_name(PATH) for role in roles]


def ids_in_lakes(world: UnionWorld) -> list[list[int]]:
    tables = [world.tiering.lake_table(name) for name in lake_tables(world)]
    found = [table.scan(selected_fields=("id",)).to_arrow() for table in tables]
    return [sorted(rows.column("id").to_pylist()) for rows in found]


def ids_in_lake(world: UnionWorld) -> list[int]:
    [found] = ids_in_lakes(world)
    return found


def at_step(step: str, act: Callable[[], None]) -> Callable[[str], None]:
    return lambda reached: act() if reached == step else None


NEW = [300, 301, 302, 303]


def test_old_rows_go_in_the_snapshot_in_which_the_new_ones_come(world: UnionWorld) -> None:
    before = ids_in_lake(world)
    replaced(world)
    assert ids_read(world) == NEW
    assert ids_in_lake(world) == before

    world.tiering.tier()

    assert ids_in_lake(world) == ids_read(world) == NEW
    snapshots = world.tiering.lake_table().snapshots()
    assert [str(s.summary.operation.value) for s in snapshots if s.summary] == [
        "append",
        "overwrite",
    ]
    assert isinstance(world.tiering.service.claim_tiering("idle"), TieringIdle)
    world.append(0, rows(400, 1))
    world.tiering.tier()
    assert ids_in_lake(world) == ids_read(world) == [*NEW, 400]


def test_a_table_that_was_emptied_is_emptied_in_the_lake(world: UnionWorld) -> None:
    world.tiering.tier()
    world.overwrite()
    assert ids_read(world) == []

    world.tiering.tier()

    assert ids_in_lake(world) == ids_read(world) == []
    current = world.tiering.lake_table().current_snapshot()
    assert current is not None
    assert current.summary is not None
    assert current.summary.operation.value == "delete"
    assert isinstance(world.tiering.service.claim_tiering("idle"), TieringIdle)


@pytest.mark.parametrize("step", ROUND_STEPS)
def test_an_overwrite_beside_a_round_is_finished_by_the_next(world: UnionWorld, step: str) -> None:
    try:
        world.tiering.round(checkpoint=at_step(step, lambda: replaced(world))).run()
    except StreamhouseError:
        # It met rows that are gone, and gave the table back.
        world.tiering.service.release(PATH)
    assert ids_read(world) == NEW

    world.tiering.tier()

    assert ids_in_lake(world) == ids_read(world) == NEW


def test_a_reader_pinned_before_fails_when_its_snapshot_is_gone(world: UnionWorld) -> None:
    world.tiering.tier()
    state = world.state()
    options = read_options({"table": PATH, "endpoint": "http://memory"}, use=BATCH)
    output = output_columns(state.table.schema, columns=None, include_metadata=False, table=PATH)
    replaced(world)
    world.tiering.tier()
    world.expire_old_snapshots()

    with pytest.raises(StreamhouseError, match="has no snapshot"):
        plan_batch_read(world.client, state, options, output)
    assert ids_read(world) == NEW


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("step", ROUND_STEPS)
def test_a_round_that_dies_leaves_old_rows_or_new_ones(
    world: UnionWorld, step: str, is_late: bool
) -> None:
    """`is_late`: the table is overwritten only after the death."""
    die_at(world, step, is_late=is_late)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("step", [*ROUND_STEPS, *BATCH_STEPS])
def test_both_layouts_end_with_the_new_rows_whatever_dies(
    laid_out: UnionWorld, step: str, is_late: bool
) -> None:
    die_at(laid_out, step, is_late=is_late)


def die_at(world: UnionWorld, step: str, *, is_late: bool) -> None:
    tiered, every = ids_in_lakes(world)[0], sorted(row.values[0] for row in world.rows)
    if not is_late:
        replaced(world)
    with pytest.raises(Killed):
        world.tiering.round(checkpoint=dying_at(step)).run()
    if is_late:
        replaced(world)
    world.tiering.service.release(PATH)
    assert ids_read(world) == NEW
    assert ids_read_by_layout(world) == [NEW] * len(lake_tables(world))
    assert all(ids in (tiered, every if is_late else NEW) for ids in ids_in_lakes(world))

    answer = world.tiering.service.claim_tiering("next", tables=[PATH])
    while not isinstance(answer, TieringIdle):
        world.tiering.round(answer).run()
        answer = world.tiering.service.claim_tiering("next", tables=[PATH])

    assert ids_read(world) == NEW
    assert ids_read_by_layout(world) == ids_in_lakes(world) == [NEW] * len(lake_tables(world))


def test_both_layouts_of_a_table_that_was_emptied_are_emptied(laid_out: UnionWorld) -> None:
    laid_out.overwrite()
    assert ids_read_by_layout(laid_out) == [[], []]

    laid_out.tiering.tier()

    assert ids_read_by_layout(laid_out) == ids_in_lakes(laid_out) == [[], []]
    assert isinstance(laid_out.tiering.service.claim_tiering("idle"), TieringIdle)


def test_a_layout_that_was_not_due_is_overwritten_when_it_is(laid_out: UnionWorld) -> None:
    world = laid_out
    before = ids_in_lakes(world)[1]
    replaced(world)
    world.tiering.round(replace(world.tiering.claim(), is_batch_due=False)).run()
    assert ids_in_lakes(world) == [NEW, before]
    assert ids_read_by_layout(world) == [NEW, NEW]

    (summary,) = world.tiering.worker().run_once()

    assert summary.error is None
    assert ids_in_lakes(world) == ids_read_by_layout(world) == [NEW, NEW]
    assert isinstance(world.tiering.service.claim_tiering("idle"), TieringIdle)


def test_a_layout_begun_after_an_overwrite_that_left_nothing(tmp_path: Path) -> None:
    with UnionWorld(tmp_path) as world:
        world.tiering.create_table(PATH, SCHEMA, bucket_count=2, bucket_key=["id"], properties=SORT)
        world.append(0, rows(0, 5))
        world.tiering.round(replace(world.tiering.claim(), is_batch_due=False)).run()
        world.overwrite()

        world.tiering.tier()

        assert ids_in_lakes(world) == ids_read_by_layout(world) == [[], []]
        world.append(1, rows(300, 4))
        world.tiering.tier()
        assert ids_in_lakes(world) == ids_read_by_layout(world) == [NEW, NEW]
