"""Runs of bytes: small and large numbers of them are handled alike, and large ones not kept."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from streamhouse.core.model.hashing.byte_runs import in_turn, joined, slice_runs


@pytest.mark.parametrize("count", [1, 2, 4_096, 4_097, 8_192, 8_193, 20_000])
def test_values_are_joined_and_cut_whatever_their_number(count: int) -> None:
    texts = [f"{n:x}".encode() for n in range(count)]
    values = pa.array(texts, pa.binary())

    for _ in range(2):
        both = joined([values, values])
        assert both.to_pylist() == [text + text for text in texts]
        offsets = np.frombuffer(both.buffers()[1], dtype=np.int32).astype(np.int64)
        data = np.frombuffer(both.buffers()[2], dtype=np.uint8)
        middles = offsets[:count] + [len(text) for text in texts]
        cut = slice_runs(data, middles, offsets[1 : count + 1], data_type=pa.binary())
        assert cut.to_pylist() == texts


def test_no_memory_of_many_values_is_kept() -> None:
    values = pa.array([b"x"] * 500_000, pa.binary())
    data, ends = np.zeros(500_000, dtype=np.uint8), np.arange(500_000)
    tracemalloc.start()
    try:
        for count in (499_998, 499_999, 500_000):
            joined([values[:count], values[:count]])
            slice_runs(data, ends[:count], ends[:count] + 1, data_type=pa.binary())
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert kept < 1 << 20


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1, 2, 3, 4, 5, 6], pa.int64()),
        pa.array([1, None, 3, 4, None, 6], pa.int16()),
        pa.array([0.5, -0.0, float("inf"), 1.0, 2.0, 3.0], pa.float32()),
        pa.array([1, 2, 3, 4, 5, 6], pa.timestamp("us", tz="UTC")),
        pa.array([True, False, None, True, True, False]),
        pa.array(["a", "", None, "four", "five", "six"]),
        pa.array([[1], [], None, [2, 3], [4], [5]], pa.list_(pa.int8())),
    ],
)
def test_values_come_in_turn(values: pa.Array) -> None:
    parts = [values[:2], values[2:4], values[4:]]

    both = in_turn(parts)
    both.validate(full=True)

    first, second, third = (part.to_pylist() for part in parts)
    wanted = [value for row in zip(first, second, third, strict=True) for value in row]
    assert both.type == values.type
    assert both.to_pylist() == wanted
    assert in_turn(parts[:1]).equals(parts[0])
    assert len(in_turn([values[:0], values[:0]])) == 0
