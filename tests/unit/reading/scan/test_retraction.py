"""Retracted offsets: packed, cut to a piece, found in a batch; change types under their names."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from streamhouse.reading.scan._retraction import (
    change_type_array,
    change_type_mask,
    retracted_mask,
)
from streamhouse.reading.scan.scan import LogPiece, RetractedOffsets


def numbers(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("offsets", [(3, 5, 6, 9), (9, 3, 6, 5)], ids=["ascending", "any order"])
def test_a_retracted_row_is_found_in_any_order(offsets: tuple[int, ...]) -> None:
    gone = retracted_mask(numbers(*offsets), numbers(1, 3, 4, 9, 12))

    assert [o for o, is_gone in zip(offsets, gone, strict=True) if is_gone] == [
        o for o in offsets if o in (3, 9)
    ]


def test_masks_equal_a_set() -> None:
    random = np.random.default_rng(7)
    for _ in range(200):
        offsets = random.choice(60, size=random.integers(0, 30), replace=False).astype(np.int64)
        # Close together, or far apart.
        offsets *= random.choice([1, 1_000])
        if random.random() < 0.5:
            offsets.sort()
        retracted = np.unique(random.integers(0, 60, size=random.integers(0, 30)))
        retracted *= random.choice([1, 1_000])

        gone = retracted_mask(offsets, retracted)

        assert gone.tolist() == [o in set(retracted.tolist()) for o in offsets.tolist()]


def test_a_piece_gets_what_is_within_its_bounds() -> None:
    retracted = RetractedOffsets.of(2, numbers(1, 3, 4, 9))

    part = retracted.between(3, 9)

    assert part is not None
    assert part.offsets.tolist() == [3, 4]
    assert part.bucket == 2
    assert retracted.between(5, 9) is None
    assert retracted.between(0, 100) == retracted
    assert RetractedOffsets.within(2, numbers(1, 3, 4, 9), None, None) == retracted
    assert part.gaps == b"\x01"
    assert pickle.loads(pickle.dumps(part)) == part


@pytest.mark.parametrize("gap", [1, 255, 256, 65_536, 2**32, 2**62])
def test_gaps_of_every_width_are_packed(gap: int) -> None:
    offsets = numbers(5, 6, 6 + gap)

    assert RetractedOffsets.of(0, offsets).offsets.tolist() == offsets.tolist()
    assert RetractedOffsets.of(0, offsets[:1]).offsets.tolist() == [5]


def test_a_log_piece_is_cut_with_its_retracted_offsets() -> None:
    retracted = RetractedOffsets.of(0, numbers(1, 3, 9))
    piece = LogPiece(bucket=0, start=0, end=10, retracted=retracted)

    first, second = piece.between(0, 5), piece.between(5, 9)

    assert first.retracted is not None
    assert first.retracted.offsets.tolist() == [1, 3]
    assert second.retracted is None


def test_change_types_have_their_names() -> None:
    codes = np.array([0, 1, 2, 3, 4, 1], dtype=np.int8)

    assert change_type_array(codes).to_pylist() == ["+A", "+I", "-U", "+U", "-D", "+I"]
    assert change_type_array(codes[:0]).to_pylist() == []


def test_change_types_are_told_by_their_names() -> None:
    names = change_type_array(np.array([1, 2, 3, 4, 0, 1], dtype=np.int8))

    assert change_type_mask(names, (1, 3)).tolist() == [True, False, True, False, False, True]
    assert change_type_mask(names.slice(2, 2), (1, 3)).tolist() == [True, False]
    assert change_type_mask(names[:0], (1,)).tolist() == []
