"""Where subscriptions begin: one start for all tables, or one of each."""

from __future__ import annotations

from typing import Any

import pytest

from streamhouse.storage_service.client.following.starts import offsets_of, starts_of
from streamhouse.storage_service.errors import InvalidRequestError
from streamhouse.storage_service.model.offsets import BucketPositions

POSITIONS = {
    0: BucketPositions(log_start_offset=5, tiered_offset=7, high_watermark=9),
    1: BucketPositions(log_start_offset=0, tiered_offset=0, high_watermark=3),
}


@pytest.mark.parametrize(
    ("path", "start", "found"),
    [
        ("t", "latest", {"default.t": "latest"}),
        ("t", {0: 4}, {"default.t": {0: 4}}),
        (["t", "db.u"], "earliest", {"default.t": "earliest", "db.u": "earliest"}),
        (["t", "db.u"], {"db.u": {0: 4}, "t": "latest"}, {"default.t": "latest", "db.u": {0: 4}}),
        (["t"], {"default.t": {"offsets": {}}}, {"default.t": {"offsets": {}}}),
    ],
)
def test_each_table_has_its_start(path: Any, start: Any, found: dict[str, Any]) -> None:
    assert starts_of(path, start) == found


@pytest.mark.parametrize(
    ("path", "start", "message"),
    [
        ([], "latest", "name 1 to 100 tables, each once, not 0"),
        (["t", "default.t"], "latest", "each once, not 2, 1 of them different"),
        ([f"t{n}" for n in range(101)], "latest", "not 101"),
        (["t", "u"], {"t": "latest"}, r"a dict with each of them \(default.t, default.u\)"),
        (["t", "u"], {0: 5, 1: 5}, "not with 0, 1"),
    ],
)
def test_a_wrong_start_of_several_is_refused(path: Any, start: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        starts_of(path, start)


@pytest.mark.parametrize(
    ("start", "committed", "found"),
    [
        ("latest", None, {0: 9, 1: 3}),
        ("earliest", None, {0: 5, 1: 0}),
        ("committed", None, {0: 5, 1: 0}),
        ("committed", {0: 8}, {0: 8, 1: 0}),
        ({1: 2}, None, {1: 2}),
    ],
)
def test_a_start_is_offsets(start: Any, committed: Any, found: dict[int, int]) -> None:
    assert offsets_of(start, lambda: POSITIONS, committed=committed) == found


def test_an_unknown_start_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not 'newest'"):
        offsets_of("newest", lambda: POSITIONS, committed=None)
