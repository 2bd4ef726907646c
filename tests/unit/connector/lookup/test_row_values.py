"""Values are taken as Arrow takes them, also where texts are taken by their views."""

from __future__ import annotations

from random import Random

import numpy as np
import pyarrow as pa
import pytest

from streamhouse.connector.lookup._row_values import RowValues

COUNT = 100_000


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("text", [pa.string(), pa.binary()])
@pytest.mark.parametrize("null_share", [0.0, 0.3])
def test_values_are_those_that_arrow_takes(
    kept: bool, text: pa.DataType, null_share: float
) -> None:
    random = Random(7)
    texts: list[str | None]
    texts = [f"{i}é"[: random.randint(0, 6)] * random.choice([1, 9]) for i in range(COUNT + 3)]
    texts = [None if random.random() < null_share else value for value in texts]
    rows = pa.RecordBatch.from_arrays(
        [
            pa.array(texts, pa.string()).cast(text).slice(3),
            pa.array(range(COUNT)),
            pa.array(["x", None] * (COUNT // 2)).cast(text),
        ],
        names=["texts", "numbers", "small"],
    )
    values = RowValues(rows, is_long_lived=kept)
    positions = np.array([random.randrange(COUNT) for _ in range(5_000)])
    for is_absent in (np.zeros(5_000, dtype=np.bool_), positions % 3 == 0):
        got = values.at(positions, is_absent)
        wanted = pa.array(positions, mask=is_absent)
        for array, source in zip(got, rows.columns, strict=True):
            array.validate(full=True)
            assert array.equals(source.take(wanted))
    assert values.nbytes - rows.nbytes == (COUNT * 16 if kept else 0)


def test_of_no_rows_all_are_null() -> None:
    rows = pa.RecordBatch.from_pydict({"text": pa.array([], pa.string())})
    got = RowValues(rows, is_long_lived=True).at(
        np.zeros(2, dtype=np.int64), np.ones(2, dtype=np.bool_)
    )
    assert [array.to_pylist() for array in got] == [[None, None]]
