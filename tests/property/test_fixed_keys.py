"""Keys that a condition names are all keys of rows for which it is true."""

from __future__ import annotations

import itertools

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.connector.changes._needed_rows import fixed_keys
from streamhouse.core.model.schema import Schema
from streamhouse.reading.where._evaluation import filter_batch
from streamhouse.reading.where.parser import parse_predicate
from tests.support.examples import examples

ARROW = pa.schema(
    [
        pa.field("a", pa.int32(), nullable=False),
        pa.field("b", pa.string(), nullable=False),
        pa.field("v", pa.int64()),
    ]
)
SCHEMA = Schema.from_arrow(ARROW)
_A, _B, _V = range(4), ("x", "y", "z"), (None, 0, 1)
ROWS = pa.RecordBatch.from_arrays(
    [
        pa.array(values, f.type)
        for values, f in zip(zip(*itertools.product(_A, _B, _V), strict=True), ARROW, strict=True)
    ],
    schema=ARROW,
)

_numbers = st.integers(0, 4)
_texts = st.sampled_from(["x", "y", "w"])
_leaves = st.one_of(
    st.builds("a = {}".format, _numbers),
    st.builds("b = '{}'".format, _texts),
    st.builds("v = {}".format, _numbers),
    st.builds("a > {}".format, _numbers),
    st.builds("b != '{}'".format, _texts),
    st.lists(_numbers, min_size=1, max_size=3).map(lambda n: f"a IN ({', '.join(map(str, n))})"),
    st.lists(_texts, min_size=1, max_size=3).map(lambda t: f"b IN ({str(t)[1:-1]})"),
    st.sampled_from(["v IS NULL", "TRUE", "FALSE"]),
)
_conditions = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.builds("({} AND {})".format, inner, inner),
        st.builds("({} OR {})".format, inner, inner),
        st.builds("(NOT {})".format, inner),
    ),
    max_leaves=8,
)


@settings(max_examples=examples(300), deadline=None)
@given(text=_conditions)
def test_every_row_that_a_condition_keeps_has_one_of_its_keys(text: str) -> None:
    predicate = parse_predicate(text, SCHEMA, table="t")
    found = fixed_keys(predicate.root, ["a", "b"])
    kept = filter_batch(predicate, ROWS).select(["a", "b"]).to_pylist()
    if found is not None:
        assert {(row["a"], row["b"]) for row in kept} <= set(found)
        assert len(found) == len(set(found))


def test_what_names_keys_and_what_does_not() -> None:
    def keys(text: str, keys_max: int = 100) -> list[tuple[object, ...]] | None:
        root = parse_predicate(text, SCHEMA, table="t").root
        return fixed_keys(root, ["a", "b"], keys_max=keys_max)

    assert keys("b = 'x' AND a IN (1, 2, 2) AND v > 3") == [(1, "x"), (2, "x")]
    assert keys("a = 1 AND b = 'x' OR a = 2 AND b IN ('y')") == [(1, "x"), (2, "y")]
    assert keys("(a = 1 AND b = 'x' OR a = 2 AND b = 'y') AND v = 1") == [(1, "x"), (2, "y")]
    assert keys("a = 1 AND a = 2 AND b = 'x'") == []
    assert keys("a = 1") is None
    assert keys("a = 1 AND b = 'x' OR v = 1") is None
    assert keys("NOT (a = 1 AND b = 'x')") is None
    assert keys("a IN (1, 2) AND b IN ('x', 'y')", keys_max=3) is None
