"""Keys are read back strictly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.errors import InvalidNameError
from streamhouse.storage_service.ownership.journal.names import (
    EPOCH_MAX,
    SEQ_MAX,
    Place,
    ShardNames,
)

_NAMES = ShardNames("0")
_PLACES = st.builds(Place, st.integers(0, EPOCH_MAX), st.integers(0, SEQ_MAX))


@given(_PLACES, _PLACES)
def test_keys_come_back_and_sort_as_their_places_do(one: Place, other: Place) -> None:
    assert _NAMES.place_of_object(_NAMES.object(one)) == one
    assert _NAMES.place_of_checkpoint(_NAMES.checkpoint(one)) == one
    assert _NAMES.epoch_of_lease(_NAMES.lease(one.epoch)) == one.epoch
    assert (_NAMES.object(one) < _NAMES.object(other)) == (one < other)
    assert (_NAMES.checkpoint(one) < _NAMES.checkpoint(other)) == (one < other)


@pytest.mark.parametrize(
    "key",
    [
        "shards/0/journal/1/000000000000",
        "shards/0/journal/00000001/000000000000.tmp",
        "shards/0/journal/00000001/00000000000\N{ARABIC-INDIC DIGIT ONE}",
        "shards/1/journal/00000001/000000000000",
        "journal/00000001/000000000000",
        "",
    ],
)
def test_foreign_names_are_said_and_ignored(key: str, caplog: pytest.LogCaptureFixture) -> None:
    assert _NAMES.place_of_object(key) is None
    assert "event=foreign_object" in caplog.text


@pytest.mark.parametrize("shard", ["", "A", "a/b", "..", "-a", "a" * 64])
def test_a_shard_cannot_have_any_name(shard: str) -> None:
    with pytest.raises(InvalidNameError):
        ShardNames(shard)
