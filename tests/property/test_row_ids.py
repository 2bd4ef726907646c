"""Whatever a primary key table goes through, a row in format version 3 keeps its id.

One example is a table's life: batches of changes, rounds of any size and cut into splits anywhere,
maintenance, an upgrade from version 2. The model knows the first version of every row: the row has
one id as long as it lives, and no other row ever has it. DuckDB reads the ids.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.reading.tail.round_planner import PlanLimits
from streamhouse.tiering.maintain._maintenance import Claim
from streamhouse.tiering.maintain._maintenance_policy import MaintenancePolicy
from tests.property.test_key_tiering import TYPES, partitionings
from tests.property.test_maintenance import limits as rewrite_limits
from tests.support.examples import examples
from tests.support.key_table_world import Address, KeyTableWorld
from tests.support.kv_world import batches, table_rules
from tests.support.row_lineage import Lineage, first_versions, lineage_in_lake

FORMAT_VERSION = "table.datalake.format-version"

plan_limits = st.builds(
    PlanLimits,
    rows_max=st.sampled_from([3, 1_000]),
    key_bucket_rows_max=st.sampled_from([2, 5, 1_000]),
    parallelism=st.integers(1, 4),
    split_rows_min=st.integers(1, 4),
)


class _Ids:
    """The ids that rows have had so far, and the addresses and lineages of the last snapshot."""

    def __init__(self, world: KeyTableWorld) -> None:
        self._world = world
        self._row_ids: dict[Address, int] = {}
        self._lineages: dict[Address, Lineage] = {}

    def check(self) -> None:
        """Compare the lake's ids, once it has every change, with those of the model."""
        lineages = lineage_in_lake(self._world)
        first = first_versions(self._world)
        assert lineages.keys() == first.keys()
        is_upgraded = self._world.tiering.lake_table().format_version == 3
        for address, lineage in lineages.items():
            if not is_upgraded or lineage.row_id is None:
                continue
            row = first[address]
            assert self._row_ids.setdefault(row, lineage.row_id) == lineage.row_id
        assert len(set(self._row_ids.values())) == len(self._row_ids)
        for address in lineages.keys() & self._lineages.keys():
            # The version was in the lake before: nothing has changed it since.
            assert lineages[address].sequence_number == self._lineages[address].sequence_number
        self._lineages = lineages if is_upgraded else {}


@settings(max_examples=examples(8), deadline=None)
@given(st.data())
def test_a_row_keeps_its_id(data: st.DataObject) -> None:
    rules = data.draw(table_rules(types=TYPES))
    with tempfile.TemporaryDirectory() as folder, KeyTableWorld(Path(folder)) as world:
        world.create_key_table(
            rules.schema.to_arrow(),
            primary_key=rules.primary_key,
            bucket_count=data.draw(st.integers(1, 2)),
            # DuckDB 1.5.5 ends with two partition columns of the same decimal type.
            partitioned_by=data.draw(partitionings(rules))[:1],
            properties={FORMAT_VERSION: data.draw(st.sampled_from(["2", "3", "3"]))},
        )
        ids = _Ids(world)
        for batch in data.draw(batches(rules, partial=True)):
            world.change(batch.changes, batch.columns)
            if data.draw(st.integers(0, 3)) == 0:
                version_3 = {FORMAT_VERSION: "3"}
                world.info = world.tiering.service.change_layout(world.PATH, version_3)
            while world.lag:
                limits = data.draw(plan_limits)
                world.tiering.round(world.tiering.claim(world.PATH), limits=limits).run()
            if world.tiering.service.table_state(world.PATH).lake.snapshot_id is None:
                continue
            ids.check()
            if data.draw(st.booleans()):
                _maintain(world, data)
                ids.check()


def _maintain(world: KeyTableWorld, data: st.DataObject) -> None:
    state = world.tiering.service.table_state(world.PATH)
    policy = replace(MaintenancePolicy.of(state.table), rewrite=data.draw(rewrite_limits))
    claim = Claim(
        epoch=state.lake.tiering_epoch,
        snapshot_id=state.lake.snapshot_id,
        on_snapshot=lambda snapshot_id: world.tiering.service.set_lake(
            world.PATH, replace(state.lake, snapshot_id=snapshot_id)
        ),
    )
    world.tiering.maintainer().maintain(world.tiering.open(), state.table, claim, policy=policy)
