"""Bytes of a table: what is hot, and what is in log and lake."""

from __future__ import annotations

import pytest

from streamhouse.core.model.table_state import BucketSizes, TableSizes


@pytest.mark.parametrize(
    ("start", "tiered", "end", "doubled"),
    [
        (0, 0, 10, 0),
        (0, 5, 10, 500),
        (4, 7, 10, 500),
        (6, 4, 10, 0),
        (0, 10, 10, 1000),
        (5, 5, 5, 0),
    ],
)
def test_what_is_tiered_and_still_in_the_log_is_doubled(
    start: int, tiered: int, end: int, doubled: int
) -> None:
    sizes = BucketSizes.of_log(1000, start=start, tiered=tiered, end=end)

    assert sizes.tiered_log_bytes == doubled


def test_sizes_add_up_over_buckets_and_survive_json() -> None:
    sizes = TableSizes(
        {
            0: BucketSizes(log_bytes=100, tiered_log_bytes=40, key_bytes=7),
            1: BucketSizes(log_bytes=50, tiered_log_bytes=0),
        }
    )

    assert TableSizes.from_json(sizes.to_json()) == sizes
    assert (sizes.hot_bytes, sizes.doubled_bytes) == (157, 40)
