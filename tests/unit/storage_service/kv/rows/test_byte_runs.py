"""Runs of bytes: small and large numbers of them are handled alike, and large ones not kept."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from streamhouse.storage_service.kv.rows.byte_runs import joined, slice_runs


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
