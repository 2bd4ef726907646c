"""Evaluation, pickling and pruning of random predicates on random rows, judged by the row model."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.lake.files.bounds import row_group_statistics
from streamhouse.reading.where._evaluation import filter_batch
from streamhouse.reading.where._pruning import may_match
from streamhouse.reading.where.predicate import Node, Predicate
from tests.support.examples import examples
from tests.support.predicate_model import evaluate, nodes, rows, to_batch, truth_values


@given(nodes(), rows())
@settings(max_examples=examples(150))
def test_every_row_gets_the_truth_value_of_the_model(
    node: Node, table_rows: list[dict[str, Any]]
) -> None:
    truths = truth_values(Predicate(node), to_batch(table_rows))

    assert truths == [evaluate(node, row) for row in table_rows]


@given(nodes(), rows(), st.integers(0, 5))
def test_filtering_keeps_the_true_rows_of_a_slice_in_order(
    node: Node, table_rows: list[dict[str, Any]], start: int
) -> None:
    positions = pa.array(range(len(table_rows)), pa.int64())
    batch = to_batch(table_rows).append_column("position", positions).slice(start)

    kept = filter_batch(Predicate(node), batch)

    expected = [i for i, row in enumerate(table_rows) if evaluate(node, row) is True]
    assert kept.schema == batch.schema
    assert kept["position"].to_pylist() == [i for i in expected if i >= start]


@given(nodes())
@settings(max_examples=examples(100))
def test_pickle_gives_the_same_predicate_back(node: Node) -> None:
    predicate = Predicate(node)

    # NaN differs from itself, so the texts are compared.
    assert repr(pickle.loads(pickle.dumps(predicate))) == repr(predicate)


@given(st.lists(nodes(), min_size=5, max_size=20), rows(), st.booleans())
@settings(max_examples=examples(60))
def test_a_row_group_that_is_pruned_has_no_matching_row(
    trees: list[Node], table_rows: list[dict[str, Any]], as_integers: bool
) -> None:
    buffer = io.BytesIO()
    table = pa.Table.from_batches([to_batch(table_rows)])
    pq.write_table(
        table,
        buffer,
        row_group_size=3,
        store_schema=False,
        store_decimal_as_integer=as_integers,
    )
    metadata = pq.ParquetFile(buffer).metadata

    for node in trees:
        predicate = Predicate(node)
        for group in range(metadata.num_row_groups):
            statistics = row_group_statistics(metadata, group, columns=predicate.columns)
            if not may_match(predicate, statistics):
                inside = table_rows[3 * group : 3 * group + 3]
                assert True not in [evaluate(node, row) for row in inside]
