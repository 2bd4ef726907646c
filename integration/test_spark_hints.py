"""A name that is wrong is answered with the user's own names, not with Spark's or ours."""

from __future__ import annotations

import pytest
from pyspark.errors import AnalysisException

import streamhouse
from integration.spark_world import SparkWorld, world
from streamhouse.core.errors import (
    InvalidNameError,
    StreamhouseError,
    TableNotFoundError,
    UnknownColumnError,
)

__all__ = ["world"]

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture(scope="module")
def accounts(world: SparkWorld) -> str:
    world.client.create_table("accounts", "id BIGINT NOT NULL, balance BIGINT", primary_key="id")
    world.client.upsert("accounts", {"id": 1, "balance": 5})
    return "default.accounts"


@pytest.mark.parametrize("on", [None, "target.id = source.id AND source.amount > 0"])
def test_a_merge_names_the_columns_of_its_sides(
    world: SparkWorld, accounts: str, on: str | None
) -> None:
    source = world.spark.createDataFrame([(1, 7)], "id bigint, amount bigint")
    table = streamhouse.Table(world.spark, accounts, endpoint=world.endpoint)
    merge = table.merge(source, on).when_matched_update({"balance": "source.amont"})

    with pytest.raises(UnknownColumnError) as refused:
        merge.execute()

    assert "names column 'source.amont'" in refused.value.message
    assert "did you mean 'source.amount'" in refused.value.message
    assert "columns: target.id, target.balance, source.id, source.amount" in refused.value.message
    assert "__" not in refused.value.message


def test_a_merge_statement_names_the_columns_of_its_sides(world: SparkWorld, accounts: str) -> None:
    source = world.spark.createDataFrame([(1, 7)], "id bigint, amount bigint")
    source.createOrReplaceTempView("payments")

    with pytest.raises((StreamhouseError, AnalysisException)) as refused:
        streamhouse.sql(
            world.spark,
            "MERGE INTO default.accounts a USING payments p ON a.id = p.id AND p.amont > 0"
            " WHEN MATCHED THEN UPDATE SET balance = p.amount",
            endpoint=world.endpoint,
        )

    assert "p.amount" in str(refused.value).replace("`", "")
    assert "__" not in str(refused.value)


def test_a_query_of_a_misspelt_table_names_the_nearest(world: SparkWorld, accounts: str) -> None:
    with pytest.raises(TableNotFoundError, match=r"did you mean 'default\.accounts'"):
        streamhouse.sql(
            world.spark, "SELECT * FROM default.acounts", endpoint=world.endpoint
        ).collect()


def test_a_table_without_a_name_in_spark_has_a_note(world: SparkWorld) -> None:
    with pytest.raises(AnalysisException, match="TABLE_OR_VIEW_NOT_FOUND") as refused:
        world.spark.sql("SELECT * FROM shop.orders")

    assert "streamhouse.attach(spark, 'shop.orders')" in "".join(refused.value.__notes__)


def test_attach_does_not_mix_up_tables_that_differ_in_case_alone(
    world: SparkWorld, accounts: str
) -> None:
    name = streamhouse.attach(world.spark, accounts, endpoint=world.endpoint)

    with pytest.raises(InvalidNameError, match=r"differs from 'default.ACCOUNTS' in case alone"):
        streamhouse.attach(world.spark, "default.ACCOUNTS", endpoint=world.endpoint)
    assert world.spark.table(name).count() == 1
