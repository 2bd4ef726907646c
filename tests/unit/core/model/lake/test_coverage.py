"""Which offsets a lake table covers, by what its snapshots and properties say."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from streamhouse.core.model.lake.coverage import (
    CoveredOffsets,
    SnapshotFacts,
    covered_offsets,
    offsets_of_properties,
)

OURS = {"streamhouse.table-id": "7", "streamhouse.tiering-epoch": "3"}
THEIRS = {**OURS, "streamhouse.table-id": "8"}
COMPACTION = SnapshotFacts(properties={}, sequence_number=9)


def _round(offsets: str, owner: Mapping[str, str] = OURS, *, at: int = 5) -> SnapshotFacts:
    properties = {**owner, "streamhouse.tiered-offsets": offsets}
    return SnapshotFacts(properties=properties, sequence_number=at)


def _covered(
    *ancestors: SnapshotFacts, table: Mapping[str, str] | None = None
) -> Mapping[int, int] | None:
    found = covered_offsets(
        ancestors, table or {}, is_owner=lambda p: p.get("streamhouse.table-id") == "7"
    )
    return None if found is None else found.tiered_offsets


def test_the_newest_ancestor_that_has_offsets_says_them() -> None:
    assert _covered(COMPACTION, _round('{"0": 4}'), _round('{"0": 2}')) == {0: 4}
    assert _covered() is None
    assert _covered(COMPACTION) is None


def test_table_properties_answer_when_all_rounds_have_expired() -> None:
    table = {**_round('{"0": 4}').properties, "streamhouse.tiered-sequence-number": "9"}

    assert _covered(COMPACTION, table=table) == {0: 4}
    later = {**table, "streamhouse.tiered-sequence-number": "10"}
    assert _covered(COMPACTION, table=later) is None, "the table was rolled back to before it"
    assert _covered(COMPACTION, table={**table, **THEIRS}) is None


def test_offsets_of_another_owner_are_none_and_hide_what_is_below() -> None:
    assert _covered(_round('{"0": 4}', THEIRS), _round('{"0": 4}')) is None
    assert _covered(_round('{"0": 4}'), _round('{"0": 4}', THEIRS)) == {0: 4}


@pytest.mark.parametrize("text", ["", "nonsense", "[1]", '{"a": 1}', '{"0": null}', "3"])
def test_what_no_round_wrote_says_nothing(text: str) -> None:
    assert offsets_of_properties(_round(text).properties) is None
    assert _covered(_round(text), _round('{"1": 2}')) == {1: 2}


def test_a_round_says_its_epoch() -> None:
    said = offsets_of_properties(_round('{"1": 2}').properties)

    assert said == CoveredOffsets(tiered_offsets={1: 2}, epoch=3)
