"""`distinct` is `np.unique` without its price, for any integers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from streamhouse.core.model.values.sorted_values import distinct


@given(
    st.sampled_from([np.int32, np.int64, np.uint64]).flatmap(
        lambda dtype: arrays.arrays(dtype, st.integers(0, 50))
    )
)
def test_distinct_is_unique(values: np.ndarray) -> None:
    before = values.copy()
    found = distinct(values)
    assert found.dtype == values.dtype
    assert found.tolist() == sorted(set(values.tolist()))
    assert (values == before).all()
