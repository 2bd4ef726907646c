"""Which files maintenance rewrites, and that doing so again and again stays cheap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from streamhouse.lake.files.deletes.deleted_positions import DeleteFile
from streamhouse.lake.snapshots.inventory import LiveDeletes, LiveFile
from streamhouse.tiering.maintain._maintenance_plan import (
    RewriteLimits,
    RewritePlan,
    merge_runs,
    plan_rewrite,
)

MB = 1 << 20
LIMITS = RewriteLimits(target_bytes=128 * MB)


def _file(number: int, size_bytes: int = MB, **fields: Any) -> LiveFile:
    values: dict[str, Any] = {
        "path": f"f{number:04d}",
        "spec_id": 0,
        "partition": (0,),
        "bucket": 0,
        "start_offset": number * 1_000,
        "size_bytes": size_bytes,
        "row_count": 1_000,
    }
    return LiveFile(**{**values, **fields})


def _deletes(name: str, *data_paths: str, size_bytes: int = 1_000, **fields: Any) -> LiveDeletes:
    values: dict[str, Any] = {
        "deletes": DeleteFile(path=name, file_bytes=size_bytes),
        "spec_id": 0,
        "partition": (0,),
        "size_bytes": size_bytes,
        "row_count": 10,
        "data_paths": frozenset(data_paths),
    }
    return LiveDeletes(**{**values, **fields})


def _names(plan: RewritePlan) -> list[list[str]]:
    return [[file.path for file in group.files] for group in plan.groups]


def test_few_small_files_wait_for_more() -> None:
    assert plan_rewrite([_file(n) for n in range(7)], [], LIMITS).is_empty
    plan = plan_rewrite([_file(n) for n in (3, 1, 7, 5, 0, 2, 6, 4)], [], LIMITS)
    assert _names(plan) == [[f"f{n:04d}" for n in range(8)]]


@pytest.mark.parametrize("field", ["partition", "spec_id", "bucket"])
def test_only_files_of_one_partition_spec_and_bucket_are_merged(field: str) -> None:
    other = {"partition": (1,), "spec_id": 1, "bucket": 1}[field]
    files = [_file(n) for n in range(4)] + [_file(n, **{field: other}) for n in range(4, 8)]

    assert plan_rewrite(files, [], LIMITS).is_empty
    both = plan_rewrite(files, [], replace(LIMITS, files_min=4))
    assert sorted(map(len, _names(both))) == [4, 4]


def test_files_of_different_slices_of_time_are_not_merged() -> None:
    sliced = replace(LIMITS, files_min=4, slice_us=1_000)
    files = [_file(n, last_timestamp_us=n * 100) for n in range(20)]
    assert _names(plan_rewrite(files, [], sliced)) == [
        [f"f{n:04d}" for n in range(10)],
        [f"f{n:04d}" for n in range(10, 20)],
    ]
    # Whatever their times are, only neighbours are merged.
    mixed = [_file(n, last_timestamp_us=n % 2 * 5_000) for n in range(20)]
    assert plan_rewrite(mixed, [], sliced).is_empty
    ageless = [_file(n) for n in range(20)]
    assert _names(plan_rewrite(ageless, [], sliced)) == [[f"f{n:04d}" for n in range(20)]]


def test_files_that_cannot_be_folded_or_have_no_bucket_are_walls() -> None:
    files = [_file(n, is_fixed=n == 4) for n in range(9)]
    assert plan_rewrite(files, [], LIMITS).is_empty
    assert plan_rewrite([_file(n, bucket=None) for n in range(20)], [], LIMITS).is_empty


def test_a_large_file_between_small_ones_stays_where_it_is() -> None:
    files = [_file(n, 120 * MB if n == 8 else MB) for n in range(17)]

    groups = _names(plan_rewrite(files, [], LIMITS))

    assert sorted(groups) == [[f"f{n:04d}" for n in range(8)], [f"f{n:04d}" for n in range(9, 17)]]


def test_a_long_run_is_cut_into_pieces_of_one_file_each() -> None:
    plan = plan_rewrite(
        [_file(n, 10 * MB) for n in range(60)], [], replace(LIMITS, bytes_max=1 << 40)
    )

    totals = [group.size_bytes // MB for group in plan.groups]
    assert sum(totals) == 600
    assert all(64 <= total <= 200 for total in totals)
    assert all(group.file_bytes >= group.size_bytes // 2 for group in plan.groups)


def test_a_piece_of_one_file_is_not_written_again() -> None:
    limits = replace(LIMITS, files_min=3)
    files = [_file(n, 90 * MB) for n in range(5)]
    worn = [replace(file, deleted_rows=300) for file in files]

    assert _names(plan_rewrite(files, [], limits)) == [["f0000", "f0001"], ["f0002", "f0003"]]
    assert sum(map(len, _names(plan_rewrite(worn, [], limits)))) == 5


def test_the_cheapest_gain_comes_first_and_what_is_left_is_said() -> None:
    small = [_file(n, 1_000) for n in range(8)]
    large = [_file(n, 60 * MB, bucket=1) for n in range(100, 108)]

    plan = plan_rewrite([*large, *small], [], replace(LIMITS, bytes_max=10 * MB))

    assert _names(plan) == [[f"f{n:04d}" for n in range(8)]]
    assert plan.has_more
    assert not plan_rewrite(small, [], LIMITS).has_more
    assert len(_names(plan_rewrite(large, [], replace(LIMITS, bytes_max=1)))) == 1


def test_files_with_many_deleted_rows_are_rewritten_even_if_large() -> None:
    files = [_file(0, 127 * MB, deleted_rows=199), _file(1, 127 * MB, deleted_rows=200)]
    deletes = [_deletes("d0", "f0000"), _deletes("d1", "f0001"), _deletes("d2", "f0000", "f0001")]

    plan = plan_rewrite(files, deletes, LIMITS)

    assert _names(plan) == [["f0001"]]
    assert [delete.deletes.path for delete in plan.dropped] == ["d1"]


def test_deletes_that_name_nothing_live_are_dropped() -> None:
    plan = plan_rewrite([_file(0)], [_deletes("d0", "gone"), _deletes("d1", "f0000")], LIMITS)

    assert [delete.deletes.path for delete in plan.dropped] == ["d0"]
    assert not plan.groups


def test_many_small_delete_files_become_one() -> None:
    files = [_file(n, 127 * MB) for n in range(2)]
    deletes = [_deletes(f"d{n}", "f0000") for n in range(8)]

    plan = plan_rewrite(files, deletes, LIMITS)

    assert [len(merge) for merge in plan.merges] == [8]
    assert plan_rewrite(files, deletes[:7], LIMITS).is_empty


def test_delete_files_are_left_when_merging_would_not_make_them_fewer() -> None:
    files = [_file(n, 127 * MB) for n in range(8)]
    deletes = [_deletes(f"d{n}", f"f{n:04d}") for n in range(8)]

    assert plan_rewrite(files, deletes, LIMITS).is_empty


def test_with_eagerness_all_neighbours_that_are_too_small_are_merged() -> None:
    sizes: list[int | None] = [100, 50_000, 100, None, 100, 100_000, 3]
    assert merge_runs(sizes, full_bytes=90_000, files_min=2, is_eager=True) == [range(3)]
    assert merge_runs(sizes, full_bytes=90_000, files_min=3) == []


def test_a_day_of_rounds_keeps_few_files_and_rewrites_each_row_a_few_times() -> None:
    files: list[LiveFile] = []
    written = rewritten = 0
    most = 0
    for number in range(1_440):
        files.append(_file(number, 300_000))
        written += 300_000
        for group in plan_rewrite(files, [], LIMITS).groups:
            rewritten += group.size_bytes
            gone = {file.path for file in group.files}
            first = group.files[0]
            merged = replace(first, path=f"{first.path}m", size_bytes=group.size_bytes)
            files = [file for file in files if file.path not in gone] + [merged]
        most = max(most, len(files))

    assert most <= 25
    assert rewritten <= 4 * written
