"""Rows restored as the lake has them, and the changelog from there on, are the rows that were lost.

A run is a seed: `check(seed)` repeats it.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.storage_service.kv.kv_tablet import KvOptions
from tests.support.examples import examples
from tests.support.kv_model import identity
from tests.support.kv_world import (
    Batch,
    LoggedBucket,
    fold_log,
    random_batch,
    random_keys,
    random_rules,
)

OPTIONS = (KvOptions(), KvOptions(cache_bytes=1 << 10, segment_bytes=256, backlog_rows=6))


def check(seed: int, folder: Path) -> None:
    random = Random(seed)
    image = random.choice(["full", "after"])
    rules = random_rules(random, {"table.changelog.image": image})
    keys = random_keys(random, rules, 15)
    lost = LoggedBucket(folder / "lost", rules)
    for _ in range(random.randint(1, 12)):
        lost.write(random_batch(random, rules, keys, rows_max=12))
    end = lost.tablet.applied_offset
    # Rounds end where they like, also between a -U and its +U.
    tiered = random.randint(0, end)
    in_lake = fold_log([e for e in lost.entries if e.offset < tiered], rules.primary_key)
    rows = list(in_lake.values())
    random.shuffle(rows)

    found = LoggedBucket(folder / "found", rules, options=random.choice(OPTIONS))
    schema = rules.schema.to_arrow()
    while rows:
        part = [rows.pop() for _ in range(random.randint(1, len(rows)))]
        batch = pa.RecordBatch.from_pylist([row for _, row in part], schema=schema)
        found.tablet.restore(batch, np.array([version for version, _ in part], dtype=np.int64))
    found.tablet.restored(tiered)
    assert found.tablet.flushed_offset == found.tablet.applied_offset == tiered
    found.log = [(base, batch) for base, batch in lost.log if base + batch.num_rows > tiered]
    if random.random() < 0.5:
        found.reopen()
    for base, batch in found.log:
        found.tablet.replay(batch, base_offset=base)
    try:
        state = fold_log(lost.entries, rules.primary_key)
        assert found.tablet.applied_offset == end
        assert found.tablet.row_count == lost.tablet.row_count == len(state)
        assert identity(found.lookup_all(list(state))) == identity(
            {key: row for key, (_, row) in state.items()}
        )
        # And each is the version it was: deleting all retracts just these offsets.
        deleted = found.plan(Batch([("delete", row) for _, row in state.values()]))
        assert sorted(deleted.changelog.column("__retracts").to_pylist()) == sorted(
            version for version, _ in state.values()
        )
    finally:
        found.tablet.close()
        lost.tablet.close()


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_restored_rows_are_the_lost_ones(seed: int) -> None:
    with TemporaryDirectory() as folder:
        check(seed, Path(folder))
