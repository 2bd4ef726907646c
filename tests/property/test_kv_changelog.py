"""The retraction rule: a lake at any boundary, less what the tail retracts, plus what survives of
the tail, is the state at the tail's end; and rounds of the same rule keep the lake.
"""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.model.changelog import UPDATE_BEFORE, FoldedTail, fold_tail
from streamhouse.core.model.merge_engine import MergeRules
from tests.support.kv_model import Entry, KvModel, Row
from tests.support.kv_world import simple_rules


def _history(random: Random, image: str) -> KvModel:
    """Apply random changes of few keys."""
    rules = simple_rules(**{"table.changelog.image": image})
    model = KvModel(
        rules.schema, rules.primary_key, rules.merge, renews_unchanged=rules.renews_unchanged
    )
    for _ in range(random.randrange(60)):
        row: Row = {"id": random.randrange(6), "name": str(random.randrange(3)), "amount": None}
        model.apply([("delete" if random.random() < 0.3 else "upsert", row)])
    return model


def _fold(entries: list[Entry], *, boundary: int) -> FoldedTail:
    return fold_tail(
        np.array([e.change_type for e in entries], dtype=np.int8),
        np.array([-1 if e.retracts is None else e.retracts for e in entries], dtype=np.int64),
        np.array([e.offset for e in entries], dtype=np.int64),
        boundary=boundary,
    )


def _rows(entries: list[Entry], folded: FoldedTail) -> dict[int, Row]:
    return {e.offset: e.row for e, lives in zip(entries, folded.survives, strict=True) if lives}


@given(st.integers(0, 2**32), st.sampled_from(["full", "after"]))
def test_lake_rounds_and_union_reads_at_any_offsets(seed: int, image: str) -> None:
    random = Random(seed)
    model = _history(random, image)
    end = len(model.log)
    state = dict(model.rows.values())
    lake: dict[int, Row] = {}
    boundary = 0
    while boundary < end:
        tail = model.log[boundary:]
        kept = tail if random.random() < 0.5 else _without_before_images(tail)
        folded = _fold(kept, boundary=boundary)
        retracted = folded.retracted.tolist()
        assert retracted == sorted(set(retracted))
        # The union read; what is retracted is in the lake, each once.
        assert set(retracted) <= set(lake)
        union = {p: row for p, row in lake.items() if p not in set(retracted)}
        union |= _rows(kept, folded)
        assert union == state

        # A tiering round takes a piece, cut anywhere.
        cut = random.randint(boundary + 1, end)
        piece = model.log[boundary:cut]
        round_ = _fold(piece, boundary=boundary)
        for offset in round_.retracted.tolist():
            del lake[offset]
        lake |= _rows(piece, round_)
        boundary = cut
    assert lake == state


def _without_before_images(entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.change_type != UPDATE_BEFORE]


def test_the_model_has_something_to_say() -> None:
    """Guards the test above: seeds do make histories with every kind of change."""
    types = {e.change_type for seed in range(20) for e in _history(Random(seed), "full").log}

    assert types == {1, 2, 3, 4}
    assert MergeRules().image == "full"
