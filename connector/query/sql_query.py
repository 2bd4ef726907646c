"""`streamhouse.sql`: Spark's SQL, where a query reads of our tables only what it needs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from streamhouse.connector.options.options import BATCH, as_options, check_keys
from streamhouse.connector.query.narrowing import NarrowedQuery, QueryTable, narrowed
from streamhouse.connector.query.statement import Statement
from streamhouse.storage_service.errors import InvalidNameError, NotFoundError

__all__ = ["sql"]


def sql(
    spark: SparkSession,
    statement: str,
    args: dict[str, Any] | list[Any] | None = None,
    **options: Any,
) -> DataFrame:
    """Return the DataFrame of a SQL query; it reads only the columns and rows that can matter.

    A table of the service is named `db.table`, or `` `db`.`table$part` ``, where Spark has no table
    or view of that name. All else that Spark's SQL names may be there too. Each statement on the
    DataFrame reads the newest rows. `explain()` of the DataFrame says first what is read.

    Args:
        spark: the session.
        statement: one query. Any other statement is given to `spark.sql` as it is.
        args: values of the statement's parameters, as for `spark.sql`.
        options: options of the format for every table, as in `endpoint="http://a:8765"`.
    """
    given = check_keys(as_options(options), uses=(BATCH,))
    read = Statement.of(statement)
    tables = {
        name: table for name in read.names if (table := _table(spark, name, given)) is not None
    }
    if not tables:
        return spark.sql(statement, args=args)
    fields = {name: f"streamhouse_{number}" for number, name in enumerate(tables)}
    text = read.template(fields)

    def build(frames: Sequence[DataFrame]) -> DataFrame:
        return spark.sql(text, args=args, **dict(zip(fields.values(), frames, strict=True)))

    return _explained(narrowed(list(tables.values()), build))


def _table(
    spark: SparkSession, name: tuple[str, ...], options: Mapping[str, str]
) -> QueryTable | None:
    """Return the service's table of a name, unless Spark has one."""
    if len(name) != 2 or spark.catalog.tableExists(".".join(f"`{part}`" for part in name)):
        return None
    table = QueryTable(spark, ".".join(name), options)
    try:
        table.schema  # noqa: B018 - asking is the act
    except (InvalidNameError, NotFoundError):
        return None
    return table


def _explained(query: NarrowedQuery) -> DataFrame:
    """Return the query's DataFrame, whose `explain` says what is read before Spark's plan."""
    frame, plain = query.frame, query.frame.explain

    @functools.wraps(plain)
    def explain(*arguments: Any, **named: Any) -> None:
        sys.stdout.write(f"{query}\n")
        plain(*arguments, **named)

    frame.explain = explain  # type: ignore[method-assign]
    return frame
