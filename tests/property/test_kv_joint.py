"""Requests planned together do in every bucket exactly what they do one after the other.

A run is a seed: `check(seed)` repeats it.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.core.model.changelog import OPERATION_NONE
from streamhouse.storage_service.kv.kv_tablet import KvOptions
from streamhouse.storage_service.kv.plan.upsert_plan import PlannedWrite
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite, plan_writes
from streamhouse.storage_service.kv.table_rules import TableRules
from tests.support.examples import examples
from tests.support.kv_model import identity
from tests.support.kv_world import (
    Batch,
    LoggedBucket,
    batch_of,
    operations_of_changes,
    random_batch,
    random_keys,
    random_rules,
)

OPTIONS = (
    KvOptions(),
    KvOptions(cache_bytes=1 << 10, segment_bytes=256, backlog_rows=6),
)
ENGINES: tuple[dict[str, str], ...] = (
    {},
    {"table.changelog.image": "after"},
    {"table.merge-engine": "aggregation", "table.delete.behavior": "allow"},
    {"table.delete.behavior": "ignore"},
)


def writes_of(
    random: Random, rules: TableRules, batch: Batch, buckets: list[set[object]]
) -> list[KeyWrite]:
    """Split a request by bucket; some of its rows do nothing."""
    writes = []
    for number, keys in enumerate(buckets):
        changes = [
            change
            for change in batch.changes
            if identity(tuple(change[1][name] for name in rules.primary_key)) in keys
        ]
        if not changes:
            continue
        part = Batch(changes, batch.columns)
        operations = operations_of_changes(part)
        operations[[random.random() < 0.1 for _ in changes]] = OPERATION_NONE
        has_none = bool(operations.any())
        writes.append(KeyWrite(number, batch_of(rules, part), operations if has_none else None))
    return writes


def check(seed: int, folder: Path) -> None:
    random = Random(seed)
    rules = random_rules(random, random.choice(ENGINES))
    keys = random_keys(random, rules, 16)
    count = random.randint(1, 4)
    of_bucket = [set(map(identity, keys[number::count])) for number in range(count)]
    options = random.choice(OPTIONS)
    alone, joint = (
        [LoggedBucket(folder / f"{kind}{n}", rules, options=options) for n in range(count)]
        for kind in ("alone", "joint")
    )
    waiting: list[tuple[int, PlannedWrite]] = []
    for _ in range(8):
        batches = [random_batch(random, rules, keys, rows_max=6) for _ in range(6)]
        batches = [batch for batch in batches if batch.columns == batches[0].columns]
        asked = [w for batch in batches for w in writes_of(random, rules, batch, of_bucket)]
        if not asked:
            continue
        parts = plan_writes([bucket.tablet for bucket in joint], asked, columns=batches[0].columns)
        for write, part in zip(asked, parts, strict=True):
            tablet = alone[write.bucket].tablet
            planned = tablet.plan(
                write.rows,
                base_offset=tablet.planned_offset,
                operations=write.operations,
                columns=batches[0].columns,
            )
            alone[write.bucket].apply(planned)
            assert (part.start, part.end) == (planned.base_offset, planned.end_offset)
            assert identity(part.changelog.to_pylist()) == identity(planned.changelog.to_pylist())
        for number, write_ in {
            w.bucket: p.write for w, p in zip(asked, parts, strict=True)
        }.items():
            joint[number].tablet.accept(write_)
            waiting.append((number, write_))
        # What is planned may wait for the log while more is planned on top of it.
        if random.random() < 0.6:
            _apply(joint, waiting)
    _apply(joint, waiting)
    for one, other in zip(alone, joint, strict=True):
        assert other.tablet.applied_offset == one.tablet.applied_offset
        assert other.tablet.row_count == one.tablet.row_count
        assert identity(other.lookup_all(keys)) == identity(one.lookup_all(keys))
        one.tablet.close()
        other.tablet.close()


def _apply(buckets: list[LoggedBucket], waiting: list[tuple[int, PlannedWrite]]) -> None:
    for number, write in waiting:
        buckets[number].apply(write)
    waiting.clear()


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_together_is_one_after_the_other(seed: int) -> None:
    with TemporaryDirectory() as folder:
        check(seed, Path(folder))
