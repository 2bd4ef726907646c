"""A batch layout is taken away and given back while its lake table is dropped in the catalog."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import ForbiddenError

from streamhouse.reading.tail.round_planner import PlanLimits
from streamhouse.tiering.round._round import BATCH_STEPS
from tests.support.key_table_world import KeyTableWorld
from tests.support.rest_world import RestWorld
from tests.support.tiering_world import Killed

SORT = {"table.datalake.batch-layout.sort": "amount, region"}
OTHER = {
    "table.datalake.batch-layout.partition": "region",
    "table.datalake.batch-layout.sort": "id",
}
BATCH = "db.t$batch"


@dataclass
class _World:
    """A primary key table with a batch layout, of which rows wait for both lake tables."""

    keys: KeyTableWorld
    rest: RestWorld
    is_rest: bool
    number: int = 0

    def __post_init__(self) -> None:
        self.tiering = self.keys.tiering

    def write(self) -> None:
        self.number += 1
        keys = range(self.number, 24, 2)
        regions = ("eu", "us", None)
        self.keys.upsert(
            *(
                {"id": key, "region": regions[key % 3], "amount": float(-key * self.number)}
                for key in keys
            )
        )
        self.keys.delete({"id": self.number})

    def lose_log(self) -> None:
        """What is in the lake is not in the log any more."""
        state = self.tiering.service.table_state("db.t")
        for bucket, end in state.reached_offsets().items():
            self.tiering.service.expire_log("db.t", bucket, end)

    def drop_layout(self, *, is_purged: bool = False) -> None:
        client = self.rest.client()
        drop = client.purge_table if is_purged else client.drop_table
        drop(("db", "t$batch"))

    def finish(self, **more: Any) -> None:
        """Rounds of new workers, until both lake tables have everything."""
        self.tiering.service.release("db.t")
        while not self._is_reached():
            self.tiering.round(**more).run()

    def _is_reached(self) -> bool:
        state = self.tiering.service.table_state("db.t")
        reached = state.reached_offsets()
        return all(at.high_watermark == reached[b] for b, at in state.positions.items())

    def check(self, layout: dict[str, str]) -> None:
        """Both lake tables have the same rows, laid out as the table says."""
        assert self.keys.in_lake() == self.keys.live
        if layout:
            table = self.tiering.lake_table(BATCH)
            state = self.tiering.service.table_state("db.t").lake.batch
            assert state is not None
            assert state.snapshot_id == table.metadata.current_snapshot_id
            assert state.table_uuid == str(table.metadata.table_uuid)
            order = [("__bucket", "ascending"), ("__offset", "ascending")]
            found = table.scan().to_arrow().sort_by(order)
            assert found == self.tiering.lake_table().scan().to_arrow().sort_by(order)
            names = [field.name for field in table.spec().fields]
            assert names == (["region"] if layout == OTHER else []) + ["id_bucket"]


@pytest.fixture(params=["direct", "rest"])
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[_World]:
    with KeyTableWorld(tmp_path) as keys, RestWorld(keys.tiering) as rest:
        opened = _World(keys, rest, is_rest=request.param == "rest")
        keys.create_key_table(bucket_count=2, properties=SORT)
        if opened.is_rest:
            rest.serve_tiering_through_rest()
        opened.write()
        opened.tiering.tier()
        opened.lose_log()
        opened.write()
        yield opened


def _at(step: str, act: Callable[[], Any]) -> Callable[[str], None]:
    def reached(now: str) -> None:
        if now == step:
            act()

    return reached


_STEPS = ["claimed", "committed", *BATCH_STEPS]


@pytest.mark.slow
@pytest.mark.one_of(2)
@pytest.mark.parametrize("is_purged", [False, True], ids=["dropped", "purged"])
@pytest.mark.parametrize("again", [SORT, OTHER], ids=["same", "another"])
def test_between_two_rounds(world: _World, again: dict[str, str], is_purged: bool) -> None:
    world.tiering.tier()
    with pytest.raises(ForbiddenError, match="must not be dropped"):
        world.drop_layout(is_purged=is_purged)
    world.tiering.service.change_layout("db.t", {})
    world.write()
    world.tiering.tier()
    world.drop_layout(is_purged=is_purged)
    world.write()
    world.tiering.tier()
    world.check({})
    world.lose_log()

    world.tiering.service.change_layout("db.t", again)
    world.write()
    world.finish(limits=PlanLimits(rows_max=9, key_bucket_rows_max=3))

    world.check(again)
    world.write()
    world.tiering.tier()
    world.check(again)


@pytest.mark.parametrize("has_rows", [True, False], ids=["filled", "not-yet"])
def test_a_layout_that_was_given_back_is_not_dropped(world: _World, has_rows: bool) -> None:
    world.tiering.tier()
    world.tiering.service.change_layout("db.t", {})
    world.tiering.service.change_layout("db.t", SORT)
    if has_rows:
        world.finish()

    with pytest.raises(ForbiddenError, match="must not be dropped"):
        world.drop_layout()

    world.write()
    world.finish()
    world.check(SORT)


@pytest.mark.one_of(4)
@pytest.mark.parametrize("is_killed", [False, True], ids=["goes-on", "dies"])
@pytest.mark.parametrize("when", ["at-once", "later"])
@pytest.mark.parametrize("step", _STEPS)
def test_while_a_worker_is_in_a_round(world: _World, step: str, when: str, is_killed: bool) -> None:
    def act() -> None:
        world.tiering.service.change_layout("db.t", {})
        world.drop_layout(is_purged=world.is_rest)
        if when == "at-once":
            world.tiering.service.change_layout("db.t", OTHER)
        if is_killed:
            raise Killed

    with pytest.raises(Killed) if is_killed else contextlib.nullcontext():
        world.tiering.round(checkpoint=_at(step, act)).run()
    if not is_killed:
        # That the layout went away is no failure: the table does not rest.
        assert world.tiering.service.failures("db.t") == []
        assert world.keys.in_lake() == world.keys.live
        assert world.tiering.service.table_state("db.t").lake.batch is None
    if when == "later":
        world.tiering.service.change_layout("db.t", OTHER)
    world.write()
    world.finish()

    world.check(OTHER)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("step", ["", *BATCH_STEPS])
def test_a_drop_that_lands_when_the_layout_is_there_again(
    world: _World, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog behind is slow, or somebody goes around the service: the copy is made anew."""
    world.tiering.tier()
    world.tiering.service.change_layout("db.t", {})
    drop = SqlCatalog.drop_table

    def drop_late(catalog: SqlCatalog, identifier: tuple[str, str]) -> None:
        world.tiering.service.change_layout("db.t", SORT)
        world.finish()
        drop(catalog, identifier)

    monkeypatch.setattr(SqlCatalog, "drop_table", drop_late)
    world.drop_layout()
    monkeypatch.undo()
    lost = world.tiering.service.table_state("db.t").lake.batch
    assert lost is not None
    world.lose_log()
    world.write()
    if step:

        def die() -> None:
            raise Killed

        with pytest.raises(Killed):
            world.tiering.round(checkpoint=_at(step, die)).run()
    world.finish()

    world.check(SORT)
    made = world.tiering.service.table_state("db.t").lake.batch
    assert made is not None
    assert made.table_uuid != lost.table_uuid
