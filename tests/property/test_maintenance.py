"""Whatever a primary key table goes through, maintenance changes no row of it.

One example is a table's life: random schema, key, buckets and lake partitioning; batches of
changes; rounds and maintenances in any order, of any eagerness, some of which die at some step;
snapshots expire at once. After each the lake is the dict model, and pinned snapshots are what they
were.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.tiering.maintain._maintenance import Claim, Maintainer
from streamhouse.tiering.maintain._maintenance_plan import RewriteLimits
from streamhouse.tiering.maintain._maintenance_policy import MaintenancePolicy
from tests.property.test_key_tiering import TYPES, partitionings
from tests.support.examples import examples
from tests.support.key_table_world import KeyTableWorld
from tests.support.kv_world import batches, table_rules
from tests.support.tiering_world import Killed

STEPS = (
    "rewrite-planned",
    "files-rewritten",
    "rewrite-staged",
    "rewrite-committed",
    "orphans-removed",
    "snapshots-expired",
    "files-found",
)

FORMAT_VERSION = "table.datalake.format-version"

limits = st.builds(
    RewriteLimits,
    target_bytes=st.sampled_from([1, 4_000, 1 << 20]),
    files_min=st.integers(2, 4),
    deletes_min=st.integers(2, 4),
    deleted_share_min=st.sampled_from([0.0001, 0.3, 1.0]),
    bytes_max=st.sampled_from([1, 1 << 30]),
    is_eager=st.booleans(),
    # One: what reads suffer from is rewritten early in small tables, too.
    excess_files_min=st.sampled_from([1, 64]),
)


@settings(max_examples=examples(5), deadline=None)
@given(st.data())
def test_maintenance_changes_no_row(data: st.DataObject) -> None:
    rules = data.draw(table_rules(types=TYPES))
    with (
        tempfile.TemporaryDirectory() as folder,
        KeyTableWorld(Path(folder)) as world,
    ):
        world.create_key_table(
            rules.schema.to_arrow(),
            primary_key=rules.primary_key,
            bucket_count=data.draw(st.integers(1, 2)),
            partitioned_by=data.draw(partitionings(rules)),
            properties={
                "table.datalake.snapshot.max-age": "1ms",
                "table.datalake.snapshot.min-count": "1",
                FORMAT_VERSION: data.draw(st.sampled_from(["2", "3"])),
            },
        )
        pinned: dict[int, Any] = {}
        for batch in data.draw(batches(rules, partial=True)):
            world.change(batch.changes, batch.columns)
            if data.draw(st.integers(0, 3)) == 0:
                version_3 = {FORMAT_VERSION: "3"}
                world.info = world.tiering.service.change_layout(world.PATH, version_3)
            world.catch_up()
            state = world.tiering.service.table_state(world.PATH)
            if data.draw(st.booleans()) and state.lake.snapshot_id is not None:
                pinned[state.lake.snapshot_id] = world.live
                holder = f"reader-{len(pinned)}"
                world.tiering.service.pin_snapshot(
                    world.PATH, state.lake.snapshot_id, holder=holder
                )
            if data.draw(st.booleans()):
                _maintain(world, data)
                assert world.in_lake() == world.live
        _maintain(world, data)
        assert world.in_lake() == world.live
        for snapshot_id, rows in pinned.items():
            assert world.in_lake(snapshot_id) == rows


def _maintain(world: KeyTableWorld, data: st.DataObject) -> None:
    """Maintain as a worker that may die; what it leaves, the next one copes with."""
    fatal = data.draw(st.sampled_from([None, *STEPS]))

    def die(step: str) -> None:
        if step == fatal:
            raise Killed

    state = world.tiering.service.table_state(world.PATH)
    if state.lake.snapshot_id is None:
        return
    maintainer = Maintainer(
        pins=world.tiering.service,
        runner=world.tiering.runner,
        filesystem=LakeFilesystem(world.tiering.catalog.properties),
        checkpoint=die,
    )
    policy = MaintenancePolicy.of(state.table)
    policy = MaintenancePolicy(rewrite=data.draw(limits), expiry=policy.expiry, orphan_age_ms_min=0)
    lake_table = world.tiering.lake().open_or_create(state.table, state.lake)
    claim = Claim(
        epoch=state.lake.tiering_epoch,
        snapshot_id=state.lake.snapshot_id,
        on_snapshot=lambda snapshot_id: world.tiering.service.set_lake(
            world.PATH, replace(state.lake, snapshot_id=snapshot_id)
        ),
    )
    with contextlib.suppress(Killed):
        maintainer.maintain(lake_table, state.table, claim, policy=policy)
