"""Composite key bytes compare exactly as the tuples they encode."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.model.bucketing import encode_key

_ROW = st.tuples(
    st.none() | st.binary(max_size=4),
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.none() | st.text(st.sampled_from("\x00\x01ab"), max_size=3),
)


@given(st.lists(_ROW, min_size=1, max_size=30))
def test_byte_order_is_tuple_order_with_nulls_first(rows: list[tuple[object, ...]]) -> None:
    columns = [
        pa.array([row[0] for row in rows], pa.binary()),
        pa.array([row[1] for row in rows], pa.int64()),
        pa.array([row[2] for row in rows], pa.string()),
    ]

    encoded = encode_key(columns).to_pylist()

    by_bytes = sorted(range(len(rows)), key=lambda i: encoded[i])
    by_value = sorted(range(len(rows)), key=lambda i: [(v is not None, v) for v in rows[i]])
    assert [rows[i] for i in by_bytes] == [rows[i] for i in by_value]
    assert len(set(encoded)) == len(set(rows))
