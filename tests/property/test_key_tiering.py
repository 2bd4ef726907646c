"""Whatever a primary key table is and goes through, after each round the lake is the dict model.

One example is a table's life: random schema, key, buckets and lake partitioning; batches of
upserts, deletes and partial updates; rounds of any size, some of which die; stock pyiceberg reads.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.core.errors import InvalidSchemaError
from streamhouse.core.model.partitioning import PartitionField
from streamhouse.reading.tail.round_planner import PlanLimits
from streamhouse.storage_service.kv.table_rules import TableRules
from streamhouse.tiering.round._round import ROUND_STEPS
from tests.support.examples import examples
from tests.support.key_table_world import KeyTableWorld
from tests.support.kv_world import FLAT_TYPES, NESTED_TYPES, Batch, batches, table_rules
from tests.support.tiering_world import Killed

# Stock pyiceberg 0.12 reads a null list of structs as an empty one.
TYPES = (*FLAT_TYPES, *NESTED_TYPES[:-1])
TRANSFORMS = ("{}", "bucket(3, {})", "truncate(2, {})", "day({})", "hour({})", "year({})")

FORMAT_VERSION = "table.datalake.format-version"

properties = st.fixed_dictionaries({"table.changelog.image": st.sampled_from(["full", "after"])})
round_limits = st.builds(
    PlanLimits,
    rows_max=st.sampled_from([7, 1_000]),
    key_bucket_rows_max=st.sampled_from([5, 1_000]),
    parallelism=st.integers(1, 3),
    split_rows_min=st.sampled_from([2, 1_000]),
)


@st.composite
def partitionings(draw: st.DrawFn, rules: TableRules) -> list[str]:
    """Up to two transforms that fit their columns."""
    fitting = []
    for column in rules.schema.columns:
        for transform in TRANSFORMS:
            field = PartitionField.parse(transform.format(column.name))
            try:
                field.check(rules.schema, table="")
            except InvalidSchemaError:
                continue
            fitting.append(str(field))
    chosen = draw(st.lists(st.sampled_from(fitting), max_size=2)) if fitting else []
    names = {PartitionField.parse(text).name: text for text in chosen}
    return list(names.values())


@settings(max_examples=examples(15), deadline=None)
@given(st.data())
def test_the_lake_is_the_model_after_every_round(data: st.DataObject) -> None:
    rules = data.draw(table_rules(merge=properties, types=TYPES))
    with (
        tempfile.TemporaryDirectory() as folder,
        KeyTableWorld(Path(folder)) as world,
    ):
        world.create_key_table(
            rules.schema.to_arrow(),
            primary_key=rules.primary_key,
            bucket_count=data.draw(st.integers(1, 3)),
            partitioned_by=data.draw(partitionings(rules)),
            properties={
                "table.changelog.image": rules.merge.image.value,
                FORMAT_VERSION: data.draw(st.sampled_from(["2", "3"])),
            },
        )
        for batch in data.draw(batches(rules, partial=True)):
            _apply(world, batch)
            if data.draw(st.integers(0, 3)) == 0:
                version_3 = {FORMAT_VERSION: "3"}
                world.info = world.tiering.service.change_layout(world.PATH, version_3)
            if data.draw(st.booleans()):
                _rounds(world, data)
                assert world.in_lake() == world.live
        _rounds(world, data)
        assert world.in_lake() == world.live


def _apply(world: KeyTableWorld, batch: Batch) -> None:
    world.change(batch.changes, batch.columns)


def _rounds(world: KeyTableWorld, data: st.DataObject) -> None:
    """Run rounds, some of which die at some step, until nothing is left to tier."""
    while world.lag:
        limits = data.draw(round_limits)
        fatal = data.draw(st.sampled_from([*[None] * 3, *ROUND_STEPS]))

        def die(step: str, fatal: str | None = fatal) -> None:
            if step == fatal:
                raise Killed

        try:
            world.tiering.round(limits=limits, checkpoint=die).run()
        except Killed:
            world.tiering.service.release(world.PATH)
