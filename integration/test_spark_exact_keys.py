"""Keys of a source in another type: without loss, or not at all; values as INSERT INTO has them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

import streamhouse
from integration.spark_world import SparkWorld, last_line, world
from streamhouse.core.errors import InvalidRequestError, SchemaMismatchError

__all__ = ["world"]

pytestmark = pytest.mark.spark

_tables = iter(range(1000))
_KEYS = {
    "date": ("date'2024-07-01'", "timestamp'2024-07-01 12:00:00'", "timestamp'2024-07-01'"),
    "bigint": ("1L", "1.5D", "1D"),
    "int": ("1", "1.50BD", "1.00BD"),
    "tinyint": ("1Y", "257L", "1L"),
    "decimal(9,2)": ("1.50BD", "1.501BD", "1.5D"),
    "string": ("'01'", "1", None),
    "timestamp_ntz": (
        "timestamp_ntz'2024-03-10 03:00:00'",
        None,
        "timestamp'2024-03-10 03:00:00'",
    ),
}
"""Type of the key -> a key that is there, a value that is none without loss, the same key."""


def _table(world: SparkWorld, key_type: str, key: str) -> streamhouse.Table:
    path = f"default.exact_{next(_tables)}"
    frame = world.spark.sql(f"SELECT CAST({key} AS {key_type}) AS k, 1 AS n, 'kept' AS v")
    world.write(frame, path, **{"primary.key": "k"})
    return streamhouse.Table(world.spark, path, endpoint=world.endpoint)


def _values(table: streamhouse.Table) -> list[Any]:
    return sorted(tuple(row) for row in table.to_df().select("n", "v").collect())


@pytest.mark.end_to_end
@pytest.mark.parametrize("key_type", _KEYS)
def test_an_insert_never_replaces(world: SparkWorld, key_type: str) -> None:
    key, lost, same = _KEYS[key_type]
    table = _table(world, key_type, key)
    for on in (None, "target.k = source.k"):
        if same is not None:
            changes = (
                table.merge(world.spark.sql(f"SELECT {same} AS k, 2 AS n, 'new' AS v"), on)
                .when_not_matched_insert_all()
                .execute()
            )
            assert (changes.rows_inserted, _values(table)) == (0, [(1, "kept")])
        if lost is None:
            continue
        source = world.spark.sql(f"SELECT {lost} AS k, 2 AS n, 'new' AS v")
        merge = table.merge(source, on)
        if key_type == "string":
            # The number 1 is the text '1', not the text '01'.
            assert merge.when_not_matched_insert_all().execute().rows_inserted == 1
            assert table.delete("n = 2").rows_deleted == 1
        else:
            with pytest.raises(InvalidRequestError, match=r"key column 'k' the value .*without"):
                merge.when_not_matched_insert_all().execute()
        assert merge.when_matched_delete().execute().rows_deleted == 0
        # The same where the table is read as a whole.
        by_join = merge.when_not_matched_by_source_update({"n": "target.n"}).when_matched_delete()
        assert by_join.execute().rows_deleted == 0
        assert _values(table) == [(1, "kept")]


def test_a_computed_key_inserts_only_where_no_row_is(world: SparkWorld) -> None:
    table = _table(world, "bigint", "1L")
    source = world.spark.sql("SELECT 0L AS k, 2 AS n, 'new' AS v")
    computed = {"k": "source.k + 1", "n": "source.n", "v": "source.v"}
    for given in (computed, computed | {"k": F.col("source.k") + 1}):
        with pytest.raises(InvalidRequestError, match=r"key of a row that is there: k = 1"):
            table.merge(source).when_not_matched_insert(given).execute()
    with pytest.raises(InvalidRequestError, match=r"column 'k' the value 0\.5.*BIGINT"):
        table.merge(source).when_not_matched_insert({"k": "source.k + 0.5"}).execute()
    assert _values(table) == [(1, "kept")]
    free = computed | {"k": "source.k + 2"}
    assert table.merge(source).when_not_matched_insert(free).execute().rows_inserted == 1
    assert _values(table) == [(1, "kept"), (2, "new")]


def test_values_are_assigned_as_insert_into_assigns_them(world: SparkWorld) -> None:
    table = _table(world, "bigint", "1L")
    source = world.spark.sql(
        "SELECT id AS k, 9007199254740993 AS wide, 7.9D AS n, date'2024-07-01' AS v"
        " FROM range(1, 3)"
    )
    # Of one column one clause gives a double, the other an int, and a third value is a bigint.
    changes = (
        table.merge(source)
        .when_matched_update({"n": "source.n"})
        .when_not_matched_insert({"k": "source.k", "n": "5", "v": "source.v"})
        .execute()
    )
    assert (changes.rows_updated, changes.rows_inserted) == (1, 1)
    assert _values(table) == [(5, "2024-07-01"), (7, "kept")]
    with pytest.raises(InvalidRequestError, match="column 'n': row 0 has 9007199254740993"):
        table.merge(source).when_matched_update({"n": "source.wide"}).execute()
    for refused in (
        lambda: table.merge(source).when_matched_update({"n": "'8'"}).execute(),
        lambda: table.update({"n": "'8'"}),
        lambda: table.merge(source).when_not_matched_insert({"k": "'3'"}).execute(),
    ):
        with pytest.raises(SchemaMismatchError, match=r"STRING|string"):
            refused()
    assert table.update({"n": "n + 0.9D", "v": "current_date() > date'2020-01-01'"}).rows_updated
    assert _values(table) == [(5, "true"), (7, "true")]
    plain = f"default.exact_{next(_tables)}"
    world.write(world.spark.sql("SELECT 1 AS n, array(1, 2) AS l UNION SELECT 2, NULL"), plain)
    log = streamhouse.Table(world.spark, plain, endpoint=world.endpoint)
    log.update({"n": "n + 0.9D", "l": "array(3L)"}, "n = 1", rewrite=True)
    assert sorted(map(tuple, log.to_df().collect())) == [(1, [3]), (2, None)]
    with pytest.raises(InvalidRequestError, match="column 'n': row 0 has 4294967297"):
        log.update({"n": "n + 4294967296"}, "n = 1", rewrite=True)


def test_writes_and_deletes_take_keys_without_loss(world: SparkWorld) -> None:
    table = _table(world, "bigint", "1L")
    row = world.spark.sql("SELECT 1.5D AS k, 2 AS n, 'new' AS v")
    for frame, options in (
        (row, {}),
        (row.select("k", "n"), {"write.mode": "partial"}),
        (row.select("k"), {"write.mode": "delete"}),
        (row, {"write.transactional": "false"}),
    ):
        with pytest.raises(Exception, match="without loss") as error:
            world.write(frame, table.path, **options)
        assert "column 'k': row 0 has 1.5" in last_line(error.value)
    world.write(row, table.path, **{"on.error": "reject"})
    assert _values(table) == [(1, "kept")]
    (rejected,) = world.load(f"{table.path}$rejected").collect()
    assert "1.5" in str(rejected)
    # A double that is a whole number is the same key.
    world.write(world.spark.sql("SELECT 1D AS k"), table.path, **{"write.mode": "delete"})
    assert _values(table) == []
    dates = pa.schema([pa.field("k", pa.date32(), nullable=False), pa.field("v", pa.int32())])
    world.client.create_table("default.exact_dates", dates, primary_key=["k"])
    noon = world.spark.sql("SELECT timestamp'2024-07-01 12:00:00' AS k, 1 AS v")
    with pytest.raises(Exception, match="without loss"):
        world.write(noon, "default.exact_dates")
