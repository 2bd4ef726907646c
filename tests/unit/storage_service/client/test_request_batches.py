"""What one append call sends: batches that fit the service's limits, whatever it was given."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from streamhouse.storage_service.client.request_batches import (
    BATCH_ROWS_MAX,
    REQUEST_BYTES_TARGET,
    bounded_batches,
)


@pytest.mark.parametrize(
    "chunk_rows", [[1] * 500, [10_000] * 20, [200_000], [0, 3, 0], [70_000, 1, 1, 70_000]]
)
def test_rows_keep_their_order_in_batches_of_a_good_size(chunk_rows: list[int]) -> None:
    ends = np.cumsum(chunk_rows)
    chunks = [
        pa.record_batch({"n": np.arange(end - rows, end)})
        for end, rows in zip(ends, chunk_rows, strict=True)
    ]

    batches = list(bounded_batches(pa.Table.from_batches(chunks)))

    assert np.array_equal(
        np.concatenate([b.column("n").to_numpy() for b in batches]), np.arange(ends[-1])
    )
    assert all(0 < b.num_rows <= BATCH_ROWS_MAX for b in batches)
    # No two neighbours would have fitted into one request.
    assert all(a.num_rows + b.num_rows > BATCH_ROWS_MAX // 2 for a, b in pairwise(batches))


def test_a_few_huge_rows_among_small_ones_do_not_make_a_huge_batch() -> None:
    texts = ["x"] * 1_000 + ["y" * 1_000_000] * 30 + ["z"] * 1_000

    batches = list(bounded_batches(pa.table({"t": texts})))

    assert all(b.nbytes <= REQUEST_BYTES_TARGET for b in batches)
    assert [t for b in batches for t in b.column("t").to_pylist()] == texts


def test_one_row_beyond_the_target_is_sent_as_it_is() -> None:
    (batch,) = bounded_batches(pa.table({"t": ["x" * (REQUEST_BYTES_TARGET + 1)]}))

    assert batch.num_rows == 1


def test_no_rows_make_no_batches() -> None:
    assert list(bounded_batches(pa.table({"t": pa.array([], pa.string())}))) == []


def test_chunks_with_dictionaries_of_their_own_are_joined() -> None:
    chunks = [pa.array(texts).dictionary_encode() for texts in (["a", "b"], ["c", "a", None])]

    (batch,) = bounded_batches(pa.table({"t": pa.chunked_array(chunks)}))

    assert batch.column("t").type == pa.string()
    assert batch.column("t").to_pylist() == ["a", "b", "c", "a", None]
