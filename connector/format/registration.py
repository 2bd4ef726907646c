"""Making the format known to a session: `register`, and `attach` for a table as a SQL name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from streamhouse.connector.format.data_source import StreamhouseDataSource
from streamhouse.connector.options.options import (
    BATCH,
    STREAM,
    WRITE,
    applicable,
    as_options,
    check_keys,
    connection_options,
)
from streamhouse.connector.stream.stream_mark import mark_streams
from streamhouse.storage_service.errors import AlreadyExistsError, InvalidNameError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["attach", "register"]

_PROVIDER_PREFIX: Final = "streamhouse_"


def register(spark: SparkSession) -> None:
    """Make the format `streamhouse` known to a session; doing it again changes nothing."""
    spark.dataSource.register(StreamhouseDataSource)
    mark_streams(type(spark.readStream))


def attach(spark: SparkSession, table: str, name: str | None = None, **options: Any) -> str:
    """Make a table a SQL name that every statement plans afresh, for SELECT and INSERT.

    A DataFrame of `load()` is pinned to the moment it was made; an attached table never is.

    Args:
        table: `database.table`, or a part of it as in `database.table$lake`.
        name: the SQL name; default: the table's own name without its database.
        options: options of the format, baked into the name, as in `where="region = 'EU'"`.

    Returns:
        The SQL name.
    """
    register(spark)
    given = as_options(options) | {"table": table}
    check_keys(given, uses=(BATCH, STREAM, WRITE))
    found = connection_options(given).name
    sql_name = name or (f"{found.path.table}_{found.part}" if found.part else found.path.table)
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*", sql_name):
        raise InvalidNameError(
            f"'{sql_name}' is not a SQL name: use letters, digits and underscores, with dots"
            " between catalog, schema and table"
        )
    provider = _provider(sql_name, given)
    spark.dataSource.register(provider)
    _make_room(spark, sql_name)
    spark.sql(f"CREATE TABLE {sql_name} USING {provider.name()}")
    return sql_name


def _make_room(spark: SparkSession, sql_name: str) -> None:
    """Drop an earlier attachment of the name, and nothing else."""
    if not spark.catalog.tableExists(sql_name):
        return
    described = spark.sql(f"DESCRIBE TABLE EXTENDED {sql_name}").collect()
    details = {row.col_name: row.data_type for row in described}
    # Spark names the provider of every table but those of Python sources, which are entries of the
    # catalog without data of their own. A view has no type.
    if "Provider" in details or details.get("Type") not in ("MANAGED", "EXTERNAL"):
        raise AlreadyExistsError(
            f"Spark has a table or view '{sql_name}' already, which is not an attached one; give"
            " another name: attach(spark, table, name)"
        )
    spark.sql(f"DROP TABLE {sql_name}")


def _provider(sql_name: str, baked: dict[str, str]) -> type[StreamhouseDataSource]:
    """Return a format of its own for one attached table.

    Spark hands the options of CREATE TABLE to neither readers nor writers: the class has them.
    """
    provider_name = _PROVIDER_PREFIX + sql_name.replace(".", "_").lower()

    class Attached(StreamhouseDataSource):
        """The format of one attached table."""

        @classmethod
        def name(cls) -> str:
            return provider_name

        def _options(self, *uses: str) -> Mapping[str, str]:
            # An option for reads must not fail an INSERT, nor the other way round.
            return applicable(baked, uses=uses) | dict(self.options)

    return Attached
