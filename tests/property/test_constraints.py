"""Random constraints on random rows, compared with the row model and with DuckDB."""

from __future__ import annotations

import datetime
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from streamhouse.core.errors import CheckFailedError, InvalidPredicateError
from streamhouse.core.model.changelog import OPERATION_DELETE, OPERATION_NONE, OPERATION_UPSERT
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.core.model.values.checks import CheckText
from streamhouse.core.rows.checked_rows import CheckedRows
from streamhouse.reading.where.checks import Check, Checks, judged
from streamhouse.reading.where.predicate import Node, Predicate
from streamhouse.storage_service.engine.keys.key_bucket import table_rules
from streamhouse.storage_service.kv.kv_tablet import KvTablet
from tests.support.examples import examples
from tests.support.predicate_model import evaluate, nodes, rows, to_batch

SCHEMA = pa.schema(
    [
        ("n", pa.int32()),
        ("x", pa.float64()),
        ("s", pa.string()),
        ("d", pa.decimal128(9, 2)),
        ("moment", pa.timestamp("us")),
        ("flag", pa.bool_()),
    ]
)
DATABASE = duckdb.connect()
DAY = datetime.datetime(2024, 1, 1)
VALUES: dict[str, tuple[list[Any], list[str]]] = {
    "n": ([None, -1, 0, 3, 2**31 - 1], ["-1", "0", "3", "2.5", "NULL"]),
    "x": ([None, float("nan"), -0.0, 0.0, 1.5, float("inf")], ["0", "1.5", "1e0", "-2", "NULL"]),
    "s": ([None, "", "a", "ab", "é", "%_"], ["''", "'a'", "'ab'", "'é'", "NULL"]),
    "d": ([None, Decimal("0.00"), Decimal("-1.25"), Decimal("99.99")], ["0", "-1.25", "99.991"]),
    "moment": ([None, DAY, DAY + datetime.timedelta(days=1)], ["'2024-01-01 00:00:00'", "NULL"]),
}


@st.composite
def conditions(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from(sorted(VALUES)))
    literal = st.sampled_from(VALUES[name][1])
    kind = draw(st.sampled_from(["compare", "between", "in", "null", "like", "flag", "columns"]))
    if kind == "compare":
        operator = draw(st.sampled_from(["=", "<>", "<", "<=", ">", ">="]))
        return f"{name} {operator} {draw(literal)}"
    if kind == "between":
        return f"{name} BETWEEN {draw(literal)} AND {draw(literal)}"
    if kind == "in":
        listed = draw(st.lists(literal, min_size=1, max_size=3))
        return f"{name} {draw(st.sampled_from(['IN', 'NOT IN']))} ({', '.join(listed)})"
    if kind == "like":
        pattern = draw(st.sampled_from(["a%", "%b", "_", "", "%"]))
        return f"s LIKE '{pattern}'"
    if kind == "columns":
        return draw(st.sampled_from(["n <= x", "d > n", "x = n", "d <> n"]))
    return f"{name} IS NOT NULL" if kind == "null" else "flag"


def predicates() -> st.SearchStrategy[str]:
    return st.recursive(
        conditions(),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda pair: f"({pair[0]} AND {pair[1]})"),
            st.tuples(inner, inner).map(lambda pair: f"({pair[0]} OR {pair[1]})"),
            inner.map(lambda one: f"NOT ({one})"),
        ),
        max_leaves=6,
    )


def table_rows() -> st.SearchStrategy[list[dict[str, Any]]]:
    values = {name: st.sampled_from(of_column) for name, (of_column, _) in VALUES.items()}
    row = st.fixed_dictionaries({**values, "flag": st.sampled_from([None, True, False])})
    return st.lists(row, max_size=12)


@given(predicates(), table_rows())
@settings(max_examples=examples(100))
def test_a_row_breaks_a_constraint_where_duckdb_finds_it_false(
    predicate: str, row_values: list[dict[str, Any]]
) -> None:
    descriptor = TableDescriptor(
        path=TablePath.parse("t"),
        schema=Schema.from_arrow(SCHEMA),
        properties={"table.check.c": predicate},
    )
    try:
        checks = Checks.of_table(TableInfo(descriptor=descriptor, table_id=1, created_at_us=0))
    except InvalidPredicateError:
        # A comparison with NULL is NULL, whatever the column: such a constraint names no column.
        assume("NULL" not in predicate)
        raise
    batch = pa.RecordBatch.from_pylist(row_values, schema=SCHEMA)

    broken = [mask.tolist() for _, mask in checks.broken(batch)]
    # A single row is judged in another way.
    row_by_row = [bool(list(checks.broken(batch.slice(at, 1)))) for at in range(len(row_values))]

    rows_table = pa.Table.from_batches([batch])
    with DATABASE.cursor() as cursor:
        cursor.register("rows_table", rows_table)
        answers = cursor.sql(f"SELECT ({predicate}) IS FALSE FROM rows_table").fetchall()
    expected = [answer for (answer,) in answers]
    assert broken == ([expected] if any(expected) else [])
    assert row_by_row == expected


@given(st.lists(nodes(), min_size=1, max_size=3), rows(), st.data())
@settings(max_examples=examples(100))
def test_rows_are_divided_as_the_model_says(
    trees: list[Node], row_values: list[dict[str, Any]], data: st.DataObject
) -> None:
    positions = pa.array(range(len(row_values)), pa.int64())
    batch = to_batch(row_values).append_column("position", positions)
    texts = [CheckText(f"c{number}", str(number)) for number in range(len(trees))]
    checks = Checks(
        "t",
        tuple(Check(text, Predicate(tree)) for text, tree in zip(texts, trees, strict=True)),
    )
    descriptor = TableDescriptor(
        path=TablePath.parse("t"), schema=Schema.from_arrow(pa.schema([("n", pa.int32())]))
    )
    info = TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)
    count = len(row_values)
    codes = data.draw(
        st.lists(
            st.sampled_from([OPERATION_UPSERT, OPERATION_DELETE, OPERATION_NONE]),
            min_size=count,
            max_size=count,
        )
    )
    operations = np.array(codes, dtype=np.int8)

    divided = judged(
        info,
        CheckedRows(batch, {}, operations=operations),
        schema_id=0,
        checks=checks,
    )

    others = operations != OPERATION_UPSERT
    broken = {
        at: texts[[evaluate(tree, row) is False for tree in trees].index(True)].name
        for at, row in enumerate(row_values)
        if not others[at] and any(evaluate(tree, row) is False for tree in trees)
    }
    assert {at: misfit.constraint for at, misfit in divided.misfits.items()} == broken
    kept = [at for at in range(count) if at not in broken]
    assert divided.rows.num_rows == len(kept)
    assert divided.rows["position"].to_pylist() == kept
    assert divided.operations is not None
    assert divided.operations.tolist() == [codes[at] for at in kept]


WIDE = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), ("amount", pa.int64()), ("least", pa.int64())]
)


def writes() -> st.SearchStrategy[list[tuple[list[str], list[dict[str, Any]], list[int]]]]:
    """Batches of upserts of some columns, with deletes between."""
    number = st.sampled_from([None, 0, 1, 2])
    row = st.fixed_dictionaries({"id": st.integers(0, 2), "amount": number, "least": number})
    columns = st.sampled_from([["id", "amount", "least"], ["id", "amount"], ["id", "least"]])
    change = st.tuples(row, st.sampled_from([OPERATION_UPSERT, OPERATION_UPSERT, OPERATION_DELETE]))
    # Many rows take the vectorised plan.
    batch = st.lists(change, min_size=1, max_size=4) | st.lists(change, min_size=80, max_size=90)
    return st.lists(
        st.tuples(columns, batch).map(lambda b: (b[0], [r for r, _ in b[1]], [o for _, o in b[1]])),
        max_size=5,
    )


@given(writes())
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.large_base_example])
def test_a_row_by_key_is_judged_as_it_will_be(
    batches: list[tuple[list[str], list[dict[str, Any]], list[int]]],
) -> None:
    descriptor = TableDescriptor(
        path=TablePath.parse("t"),
        schema=Schema.from_arrow(WIDE),
        primary_key=("id",),
        properties={"table.check.enough": "amount >= least"},
    )
    rules = table_rules(TableInfo(descriptor=descriptor, table_id=1, created_at_us=0))
    stored: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tablet = KvTablet(Path(folder) / "rows", table_id=1, bucket=0, rules=rules)
        for columns, values, operations in batches:
            after, is_broken = dict(stored), False
            for row, operation in zip(values, operations, strict=True):
                if operation == OPERATION_DELETE:
                    after.pop(row["id"], None)
                    continue
                nothing = {"amount": None, "least": None}
                new = after.get(row["id"], nothing) | {name: row[name] for name in columns}
                after[row["id"]] = new
                amount, least = new["amount"], new["least"]
                is_broken |= amount is not None and least is not None and amount < least
            schema = pa.schema([WIDE.field(name) for name in columns])
            rows_of_batch = pa.RecordBatch.from_pylist(
                [{name: row[name] for name in columns} for row in values], schema=schema
            )
            named = None if len(columns) == 3 else columns
            try:
                planned = tablet.plan(
                    rows_of_batch,
                    base_offset=tablet.planned_offset,
                    operations=np.array(operations, dtype=np.int8),
                    columns=named,
                )
            except CheckFailedError:
                assert is_broken
                continue
            assert not is_broken
            tablet.apply(planned)
            stored = after
        assert tablet.row_count == len(stored)
        tablet.close()
