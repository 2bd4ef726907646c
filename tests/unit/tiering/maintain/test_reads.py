"""Reads stay cheap under constant updates: small files are packed as soon as they cost too much."""

from __future__ import annotations

import datetime
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.lake.files.deletes.deleted_positions import DeleteFile
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.snapshots.inventory import (
    Head,
    InventoryReader,
    LiveDeletes,
    LiveFile,
)
from streamhouse.tiering.maintain._due import TableMemory
from streamhouse.tiering.maintain._maintenance_plan import RewriteLimits, RewritePlan, plan_rewrite
from streamhouse.tiering.maintain._reads import FILE_ROWS, least_files, plan_for_reads
from tests.support.examples import examples
from tests.support.key_table_world import KeyTableWorld

LIMITS = RewriteLimits(target_bytes=128 << 20)
BYTES_PER_ROW = 20
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("day", pa.date32(), nullable=False),
        pa.field("amount", pa.int64()),
    ]
)


def _file(name: str, place: int, number: int, rows: int, deleted: int = 0) -> LiveFile:
    return LiveFile(
        path=name,
        spec_id=0,
        partition=(place,),
        bucket=0,
        start_offset=number * 10_000_000,
        size_bytes=rows * BYTES_PER_ROW,
        row_count=rows,
        deleted_rows=deleted,
    )


def _deletes(name: str, place: int, *paths: str) -> LiveDeletes:
    return LiveDeletes(
        deletes=DeleteFile(path=name, file_bytes=1_000),
        spec_id=0,
        partition=(place,),
        size_bytes=1_000,
        row_count=10,
        data_paths=frozenset(paths),
    )


def _after_rounds(
    places: int, *, old_rows: int, rounds: int
) -> tuple[list[LiveFile], list[LiveDeletes]]:
    """A packed table after rounds that each updated ten rows everywhere."""
    files, deletes = [], []
    for place in range(places):
        files.append(_file(f"old-{place}", place, 0, old_rows, deleted=10 * rounds))
        for number in range(1, rounds + 1):
            files.append(_file(f"new-{place}-{number}", place, number, 10))
            deletes.append(_deletes(f"deletes-{place}-{number}", place, f"old-{place}"))
    return files, deletes


def test_one_round_that_goes_everywhere_is_packed_at_once() -> None:
    files, deletes = _after_rounds(200, old_rows=1_000, rounds=1)
    assert plan_rewrite(files, deletes, LIMITS).is_empty
    plan = plan_for_reads(files, deletes, LIMITS)
    assert sum(len(group.files) for group in plan.groups) > 300
    assert len(plan.dropped) > 150
    assert not plan.has_more


def test_no_more_is_rewritten_than_brings_reads_down() -> None:
    files, deletes = _after_rounds(200, old_rows=100_000, rounds=3)
    plan = plan_for_reads(files, deletes, LIMITS)
    # New files become one a place, deletes too; the large ones are not read for that.
    assert {len(group.files) for group in plan.groups} == {3}
    assert len(plan.merges) == 200
    assert plan.size_bytes == 200 * 3 * 10 * BYTES_PER_ROW


@pytest.mark.parametrize(
    ("places", "old_rows", "rounds"),
    [
        pytest.param(200, 1_000_000, 2, id="large files cost more than small ones beside them"),
        pytest.param(20, 1_000, 1, id="few files"),
    ],
)
def test_what_costs_readers_little_waits(places: int, old_rows: int, rounds: int) -> None:
    files, deletes = _after_rounds(places, old_rows=old_rows, rounds=rounds)
    assert plan_for_reads(files, deletes, LIMITS).is_empty


def test_files_that_cannot_be_packed_are_no_debt() -> None:
    full = [_file(f"f{n}", 0, n, LIMITS.target_bytes // BYTES_PER_ROW) for n in range(100)]
    fixed = [replace(_file(f"x{n}", 1, n, 10), is_fixed=True) for n in range(100)]
    placeless = [replace(_file(f"p{n}", 2, n, 10), bucket=None) for n in range(100)]
    files = [*full, *fixed, *placeless]
    assert least_files(files, LIMITS) == 300
    assert plan_for_reads(files, [], LIMITS).is_empty


def test_files_of_two_slices_of_time_stay_two() -> None:
    limits = replace(LIMITS, slice_us=100)
    files = [
        replace(_file(f"f{place}-{n}", place, n, 10), last_timestamp_us=n * 50)
        for place in range(100)
        for n in range(4)
    ]
    assert least_files(files, limits) == 200
    groups = plan_for_reads(files, [], limits).groups
    assert {tuple(f.last_timestamp_us for f in g.files) for g in groups} == {(0, 50), (100, 150)}


_sizes = st.lists(
    st.lists(st.sampled_from([1, 50, 20_000, 800_000, 7_000_000]), max_size=6), max_size=40
)


@settings(max_examples=examples(40), deadline=None)
@given(_sizes, st.integers(1, 40), st.data())
def test_a_plan_for_readers_is_a_plan_and_never_a_worse_one(
    sizes: list[list[int]], excess_files_min: int, data: st.DataObject
) -> None:
    limits = replace(LIMITS, excess_files_min=excess_files_min, bytes_max=64 << 20)
    files = [
        _file(f"f{place}-{number}", place, number, rows)
        for place, members in enumerate(sizes)
        for number, rows in enumerate(members)
    ]
    deletes = [
        _deletes(f"d{number}", file.partition[0], file.path)
        for number, file in enumerate(files)
        if data.draw(st.booleans())
    ]
    ordinary = plan_rewrite(files, deletes, limits)
    plan = plan_for_reads(files, deletes, limits)

    assert _files_left(files, deletes, plan) <= _files_left(files, deletes, ordinary)
    order = {file.path: (file.partition, i) for i, file in enumerate(files)}
    for group in plan.groups:
        places = [order[file.path] for file in group.files]
        first = places[0]
        assert places == [(first[0], first[1] + n) for n in range(len(places))]
    paths = [file.path for group in plan.groups for file in group.files]
    assert len(paths) == len(set(paths))


def _files_left(files: list[LiveFile], deletes: list[LiveDeletes], plan: RewritePlan) -> int:
    saved = sum(len(group.files) - group.outputs for group in plan.groups)
    merged = sum(len(merge) - 1 for merge in plan.merges)
    return len(files) + len(deletes) - saved - len(plan.dropped) - merged


def _memory() -> TableMemory:
    memory = TableMemory(InventoryReader(LakeFilesystem({})))
    memory.planned_at, memory.planned_for, memory.least_files = 1, LIMITS, 200
    return memory


def _head(file_count: int, rows: int = 1_000) -> Head:
    return Head(
        sequence_number=2,
        file_count=file_count,
        row_count=rows,
        live_row_count=rows,
        snapshot_count=2,
        committed_ms=0,
        orphans_removed_ms=0,
    )


def test_debt_is_due_when_reads_cost_half_as_much_again() -> None:
    memory = _memory()
    due = {n: memory.has_read_debt(_head(n), LIMITS, now_s=0) for n in (200, 263, 300, 301, 600)}
    assert due == {200: False, 263: False, 300: False, 301: True, 600: True}
    # Rows that have to be read anyway make files cheap beside them.
    assert not memory.has_read_debt(_head(600, rows=1_000 * FILE_ROWS), LIMITS, now_s=0)
    # What was planned under other limits says nothing.
    other = replace(LIMITS, target_bytes=1)
    assert not memory.has_read_debt(_head(600), other, now_s=0)


def test_rewrites_for_readers_take_a_quarter_of_the_time_and_less_where_rounds_wait() -> None:
    memory = _memory()
    memory.rewritten(began_s=90, ended_s=100)
    due = [
        (after_s, patience)
        for after_s in (29, 30, 239, 240)
        for patience in (1, 8)
        if memory.has_read_debt(_head(600), LIMITS, now_s=100 + after_s, patience=patience)
    ]
    assert due == [(30, 1), (239, 1), (240, 1), (240, 8)]


def test_what_no_plan_can_mend_is_not_planned_after_each_round() -> None:
    memory = _memory()
    memory.hopeless_units = 600 * FILE_ROWS
    assert not memory.has_read_debt(_head(650), LIMITS, now_s=0)
    assert memory.has_read_debt(_head(700), LIMITS, now_s=0)


@pytest.mark.slow
def test_a_table_under_constant_updates_has_few_files_after_each_round(
    key_world: KeyTableWorld,
) -> None:
    """Thirty-two months and two buckets, and rows of everywhere in each round."""
    key_world.create_key_table(
        SCHEMA,
        primary_key=("id", "day"),
        bucket_key=("id",),
        bucket_count=2,
        partitioned_by=("months(day)",),
    )
    passed_s = [0.0]
    maintainer = key_world.tiering.maintainer(monotonic_s=lambda: passed_s[0])
    files = []
    for number in range(5):
        # All rows first, then every other one.
        keys = range(256) if not number else range(number % 2, 256, 2)
        key_world.upsert(*({"id": k, "day": _month(k), "amount": number} for k in keys))
        key_world.tiering.round(maintainer=maintainer).run()
        passed_s[0] += 60
        debt = maintainer.debt(key_world.tiering.open())
        assert debt is not None
        files.append(debt.data_files + debt.delete_files)
        if not number:
            told = key_world.tiering.service.debt("db.t")
            assert told is not None
            assert (told.round_files, told.round_rows, told.is_scattered) == (64, 256, True)
        assert key_world.in_lake() == key_world.live

    debt = key_world.tiering.service.debt("db.t")
    assert debt is not None
    assert debt.needed_files == 64
    # One file in each of 64 places, and what a round may add before it is worth a rewrite.
    assert files[0] == 64
    assert max(files) <= 128
    assert key_world.union.read().num_rows == 256


@pytest.mark.slow
def test_rounds_close_together_do_not_shorten_the_rest(key_world: KeyTableWorld) -> None:
    key_world.create_key_table(
        SCHEMA,
        primary_key=("id", "day"),
        partitioned_by=("months(day)",),
    )
    now_s = [0.0]

    def rewriting(step: str) -> None:
        if step == "files-rewritten":
            now_s[0] += 10_000

    maintainer = key_world.tiering.maintainer(monotonic_s=lambda: now_s[0], checkpoint=rewriting)
    rewritten_in = []
    for number in range(12):
        began_s = now_s[0]
        # New rows, in each second place after the first round: eight rounds are four files a place.
        keys = range(64) if not number else range(number % 2, 64, 2)
        rows = (
            {"id": 64 * number + k, "day": datetime.date(2000 + k, 1, 1), "amount": 0} for k in keys
        )
        key_world.upsert(*rows)
        key_world.tiering.round(maintainer=maintainer).run()
        if now_s[0] > began_s:
            rewritten_in.append(number)
        now_s[0] += 1
    assert len(rewritten_in) == 1
    now_s[0] += 30_000
    key_world.upsert({"id": 100_000, "day": datetime.date(2000, 1, 1), "amount": 0})
    key_world.tiering.round(maintainer=maintainer).run()
    assert now_s[0] > 50_000
    assert key_world.in_lake() == key_world.live


def _month(key: int) -> datetime.date:
    return datetime.date(2020 + key // 2 % 32 // 12, key // 2 % 32 % 12 + 1, 1)
