"""Buckets share one budget of memory: fairly, and without any of them losing a row."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from streamhouse.storage_service.kv.cache._memory_budget import KvOptions, MemoryBudget
from streamhouse.storage_service.kv.kv_tablet import KvTablet
from tests.support.kv_world import looked_up, simple_rules

RULES = simple_rules()
MIB = 1 << 20


def test_a_share_is_what_the_others_leave_and_at_least_an_equal_part() -> None:
    budget = MemoryBudget(100)
    one, other = budget.join(), budget.join()

    assert one.report(10) == 100
    assert other.report(80) == 90
    assert one.report(70) == 50
    assert budget.used_bytes == 150
    assert other.report(30) == 50
    assert one.report(70) == 70
    one.leave()
    one.leave()
    assert other.report(30) == 100
    assert budget.used_bytes == 30


def _rows(start: int, count: int) -> pa.RecordBatch:
    ids = pa.array(range(start, start + count), pa.int64())
    names = pa.array([f"row {i} of some length" for i in range(start, start + count)])
    amounts = pa.nulls(count, pa.float64())
    return pa.record_batch([ids, names, amounts], schema=RULES.schema.to_arrow())


def _write(tablet: KvTablet, start: int, count: int) -> None:
    tablet.apply(tablet.plan(_rows(start, count), base_offset=tablet.planned_offset))
    if tablet.needs_upkeep:
        tablet.keep_up()


def _used(tablet: KvTablet) -> int:
    memory = tablet.memory_bytes()
    return memory["cache"] + memory["backlog"]


def test_a_full_bucket_makes_room_for_others_and_finds_its_rows_all_the_same(
    tmp_path: Path,
) -> None:
    options = KvOptions.shared(cache_bytes=64 * MIB, memory_bytes=16 * MIB)
    tablets = [
        KvTablet(tmp_path / str(n), table_id=1, bucket=n, rules=RULES, options=options)
        for n in range(4)
    ]
    first, *others = tablets
    for start in range(0, 100_000, 5_000):
        _write(first, start, 5_000)
    alone = _used(first)
    assert 5 * MIB < alone < 13 * MIB

    for start in range(0, 50_000, 5_000):
        for tablet in others:
            _write(tablet, start, 5_000)
    first.keep_to_budget()

    assert _used(first) < alone * 0.8
    assert sum(map(_used, tablets)) < 13 * MIB
    keys = pa.record_batch([pa.array(range(0, 100_000, 1_000), pa.int64())], names=["id"])
    assert looked_up(first, keys).found.all()
    assert first.row_count == 100_000
    for tablet in others:
        assert looked_up(tablet, keys).found.sum() == 50
    for tablet in tablets:
        tablet.close()
    assert options.memory is not None
    assert options.memory.used_bytes == 0


def test_a_bucket_of_few_rows_takes_little(tmp_path: Path) -> None:
    options = KvOptions.shared(cache_bytes=256 * MIB, memory_bytes=2_048 * MIB)
    tablet = KvTablet(tmp_path, table_id=1, bucket=0, rules=RULES, options=options)
    _write(tablet, 0, 100)
    tablet.flush()

    assert _used(tablet) < 64 << 10
    tablet.close()
