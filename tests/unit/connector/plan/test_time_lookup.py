"""The first offset at or after a time, in whichever tier it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamhouse.connector.stream.stream_start import offsets_at
from tests.support.tiering_world import SCHEMA, rows
from tests.support.union_world import UnionWorld


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnionWorld]:
    """Two buckets with five appends each: some only in the lake, some in both, some in the log."""
    with UnionWorld(Path(tmp_path_factory.mktemp("time"))) as opened:
        opened.tiering.create_table(UnionWorld.PATH, SCHEMA, bucket_count=2)
        for i in range(10):
            opened.append(i % 2, rows(i * 3, 3))
            if i in (2, 5):
                opened.tiering.tier()
        opened.expire_log(0, 7)
        opened.expire_log(1, 3)
        yield opened


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.integers(-2, 12), st.sampled_from([-1, 0, 1]))
def test_the_first_row_written_since(world: UnionWorld, append: int, shift_us: int) -> None:
    first = world.rows[0].timestamp_us
    moment = first + append * 1_000 + shift_us
    expected = {
        bucket: min(
            (r.offset for r in world.rows if r.bucket == bucket and r.timestamp_us >= moment),
            default=at.high_watermark,
        )
        for bucket, at in world.state().positions.items()
    }

    assert offsets_at(world.client, world.state(), moment) == expected
