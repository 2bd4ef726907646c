"""The public functions: `register`, `attach` for a table as a SQL name, `write_batch`.

Spark asks a Python source for its columns before the source can learn whether the read is a stream.
But the stream of a primary key table has an additional column: `__change_type`. Therefore
`register` makes `readStream` mark loads of our format by an option. A stream of another language,
or by the name of an attached table, has no mark and needs the option `readChangeFeed`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from streamhouse.connector._spark_versions import GIVES_READ_LIMITS, warn_of_unknown_version
from streamhouse.connector.format._spark_readers import (
    QUERY_ID,
    hand_over_zone,
    mark_streams,
    plan_reads_afresh,
    session_zone,
    warn_of_stale_reads,
)
from streamhouse.connector.format._stream_steps import run_in_steps
from streamhouse.connector.format._worker_python import use_own_python
from streamhouse.connector.format.data_source import StreamhouseDataSource
from streamhouse.connector.names._attached_names import (
    AttachedName,
    catalog_name,
    is_attached,
    remember_name,
    remembered_name,
    run_as_spark,
)
from streamhouse.connector.names._hooks import answer_statements
from streamhouse.connector.names._wrapped_methods import has_jvm, wrap_method
from streamhouse.connector.write._write_options import WriteOptions, write_options
from streamhouse.core.errors import (
    AlreadyExistsError,
    InvalidNameError,
    InvalidRequestError,
    NotFoundError,
    UnknownColumnError,
)
from streamhouse.reading.options.connection import client_for, connection_options
from streamhouse.reading.options.options import (
    BATCH,
    FORMAT,
    PROVIDER_PREFIX,
    STREAM,
    WRITE,
    applicable,
    as_options,
    check_keys,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
from pyspark.errors import PySparkException
from pyspark.sql.datasource import DataSourceReader, DataSourceWriter
from pyspark.sql.types import StructField, StructType

__all__ = ["attach", "register", "write_batch"]

_REGISTERED: Final = "spark.sql.streamhouse.registered"
_WITH_COUNTS: Final = "_with_counts"


def register(spark: SparkSession) -> None:
    """Make the format `streamhouse` known to a session; a second call changes nothing.

    The function also switches `spark.sql.python.filterPushdown.enabled` on. With this setting each
    statement, and each micro-batch that joins a DataFrame of the format, reads the newest rows.
    With a local master and no choice of the workers' Python, the workers run the program's own.
    """
    warn_of_unknown_version()
    use_own_python(spark)
    if not _is_registered(spark):
        try:
            spark.dataSource.register(StreamhouseDataSource)
        except PySparkException as error:
            # The server of Spark Connect 4.0 has found the format by itself.
            if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
                raise
        # A declarative pipeline cannot change settings, and registers only once.
        with contextlib.suppress(PySparkException):
            spark.conf.set(_REGISTERED, "true")
    mark_streams(type(spark.readStream))
    plan_reads_afresh(spark)
    for writer_class in _writer_classes(spark):
        hand_over_zone(writer_class)
    if not GIVES_READ_LIMITS:
        run_in_steps(_writer_classes(spark)[1])
    if _is_connect(spark):
        _let_pipelines_end(spark)
    answer_statements(spark, _attach)


def _is_registered(spark: SparkSession) -> bool:
    """Whether the session has the format, of an earlier call or found by Spark itself.

    Spark warns of each registration after the first. A client of Spark Connect cannot ask Spark, so
    the client keeps a setting.
    """
    if not has_jvm(spark):
        return spark.conf.get(_REGISTERED, "") == "true"
    state: Any = spark._jsparkSession.sessionState()
    return bool(state.dataSourceManager().dataSourceExists(FORMAT))


def _is_connect(spark: SparkSession) -> bool:
    return type(spark).__module__.startswith("pyspark.sql.connect")


def _let_pipelines_end(spark: SparkSession) -> None:
    """Make `spark-pipelines` end without an error after a run with Python workers.

    The server sends metrics of Python workers with the events of a run. PySpark 4.3 takes the
    metrics for an unknown response, and ends with an error after the run has completed.
    """
    from pyspark.sql.connect.client.core import PlanObservedMetrics  # noqa: PLC0415 - Spark Connect is an extra

    class WithoutCounts:
        """The client, without these responses."""

        def __init__(self, client: Any) -> None:
            self._client = client

        def __getattr__(self, name: str) -> Any:
            return getattr(self._client, name)

        def _execute_and_fetch_as_iterator(self, *arguments: Any) -> Iterator[Any]:
            responses = self._client._execute_and_fetch_as_iterator(*arguments)
            return (r for r in responses if not isinstance(r, PlanObservedMetrics))

    def followed(self: Any, follow: Any, *arguments: Any, **named: Any) -> Any:
        return follow(WithoutCounts(self), *arguments, **named)

    wrap_method(type(spark.client), "execute_command_as_iterator", followed, mark=_WITH_COUNTS)


def _writer_classes(spark: SparkSession) -> tuple[type, ...]:
    """Return the classes of `DataFrame.write` and `writeStream`, of this kind of session."""
    if _is_connect(spark):
        from pyspark.sql.connect import readwriter as connect_writer  # noqa: PLC0415 - Spark Connect is an extra
        from pyspark.sql.connect.streaming import readwriter as connect_stream_writer  # noqa: PLC0415 - Spark Connect is an extra

        return connect_writer.DataFrameWriter, connect_stream_writer.DataStreamWriter
    from pyspark.sql import DataFrameWriter  # noqa: PLC0415 - a Connect session has other classes
    from pyspark.sql.streaming.readwriter import DataStreamWriter  # noqa: PLC0415 - a Connect session has other classes

    return DataFrameWriter, DataStreamWriter


def attach(spark: SparkSession, table: str, name: str | None = None, **options: Any) -> str:
    """Make a table a SQL name that every statement plans afresh, for SELECT and INSERT.

    A stream that joins the name in its SQL reads the newest rows in each micro-batch if the join
    compares columns, by `=` or `<`; a DataFrame of `spark.table(name)` does so in every join.

    Args:
        table: `database.table`, or a part of it as in `database.table$lake`.
        name: the SQL name; default: the table's own name without its database.
        options: options of the format, baked into the name, as in `where="region = 'EU'"`.

    Returns:
        The SQL name.
    """
    register(spark)
    return _attach(spark, table, name, options)


def _attach(spark: SparkSession, table: str, name: str | None, options: Mapping[str, Any]) -> str:
    all_options = session_zone(spark) | as_options(options) | {"table": table}
    check_keys(all_options, uses=(BATCH, STREAM, WRITE))
    table_name = connection_options(all_options).name
    sql_name = name or (
        f"{table_name.path.table}_{table_name.part}" if table_name.part else table_name.path.table
    )
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*", sql_name):
        raise InvalidNameError(
            f"'{sql_name}' is not a SQL name: use letters, digits and underscores, with dots"
            " between catalog, schema and table"
        )
    warn_of_stale_reads(spark, sql_name)
    in_catalog, session = catalog_name(spark, sql_name.split(".")), _session_id(spark)
    earlier = remembered_name(spark, in_catalog)
    if earlier is not None:
        _check_no_twin(spark, earlier, sql_name, str(table_name))
    if earlier is not None and (earlier.session, earlier.options) == (session, all_options):
        # Spark warns of each registration after the first, and the class would be the same.
        provider_name, schema = earlier.provider, earlier.schema
    else:
        provider = _provider(sql_name, all_options)
        spark.dataSource.register(provider)
        provider_name, schema = provider.name(), lambda: provider({}).schema()
    attached = AttachedName(
        sql_name=in_catalog,
        provider=provider_name,
        options=all_options,
        schema=schema,
        session=session,
    )
    remember_name(spark, attached)
    _make_room(spark, sql_name)
    run_as_spark(spark, f"CREATE TABLE {sql_name} USING {provider_name}")
    return sql_name


def _check_no_twin(spark: SparkSession, earlier: AttachedName, sql_name: str, table: str) -> None:
    """Raise if the name is attached to a table whose name differs from `table` in case alone."""
    other = str(earlier.connection.name)
    is_twin = other != table and other.lower() == table.lower()
    if is_twin and spark.catalog.tableExists(sql_name):
        raise InvalidNameError(
            f"'{sql_name}' is attached to '{other}', which differs from '{table}' in case alone,"
            f" and Spark takes both names for one: attach(spark, '{table}', 'another_name')"
        )


def _session_id(spark: Any) -> str:
    """Return the id of a session: a format is registered in one session."""
    if has_jvm(spark):
        return str(spark._jsparkSession.sessionUUID())
    return str(spark.session_id)


def _make_room(spark: SparkSession, sql_name: str) -> None:
    """Drop an earlier attachment of the name, and nothing else."""
    if not spark.catalog.tableExists(sql_name):
        return
    if not is_attached(spark, sql_name):
        raise AlreadyExistsError(
            f"Spark has a table or view '{sql_name}' already, which is not an attached one; give"
            " another name: attach(spark, table, name)"
        )
    run_as_spark(spark, f"DROP TABLE {sql_name}")


def _provider(sql_name: str, baked: dict[str, str]) -> type[StreamhouseDataSource]:
    """Return the format of an attached table.

    Spark passes the options of CREATE TABLE neither to readers nor to writers: the class has them.
    """
    provider_name = PROVIDER_PREFIX + sql_name.replace(".", "_").lower()

    class Attached(StreamhouseDataSource):
        """The format of one attached table."""

        @classmethod
        def name(cls) -> str:
            return provider_name

        def schema(self) -> StructType:
            # Spark plans a scan afresh for a micro-batch only with a filter to offer. For a join on
            # nullable columns Spark adds the filter "the column is not null" by itself.
            fields = super().schema().fields
            return StructType(
                [StructField(f.name, f.dataType, metadata=f.metadata) for f in fields]
            )

        def reader(self, schema: StructType) -> DataSourceReader:
            with _hinting(provider_name):
                return super().reader(schema)

        def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
            with _hinting(provider_name):
                return super().writer(schema, overwrite)

        def _options(self, *uses: str) -> Mapping[str, str]:
            # An option for reads must not fail an INSERT, and an option for writes no SELECT.
            return applicable(baked, uses=uses) | dict(self.options)

    return Attached


@contextlib.contextmanager
def _hinting(provider_name: str) -> Iterator[None]:
    """Add the origin of the requested columns to the error for a missing column."""
    try:
        yield
    except UnknownColumnError as error:
        name = provider_name.removeprefix(PROVIDER_PREFIX)
        raise UnknownColumnError(
            f"{error.message}; Spark's catalog has other columns for the attached name"
            f" ('{name}'): attach it again, or REFRESH TABLE it"
        ) from None


def write_batch(
    df: DataFrame, batch_id: int, *, table: str, app_id: str | None = None, **options: Any
) -> None:
    """Write the rows of a micro-batch to a table, all of them once; for use in `foreachBatch`.

    A repeated micro-batch writes nothing. With `sequence.column` the rows are sorted unless the
    table compares the column itself.

    Args:
        table: `database.table`.
        app_id: the id of the writer, the same after every restart; default: the query's id, which
            the checkpoint keeps. Two calls for the same table in the same micro-batch need two
            ids; with the same id the second call is refused.
        options: options of a write, as in `**{"write.mode": "partial"}`.
    """
    register(df.sparkSession)
    all_options = as_options(options) | {
        "table": table,
        "app.id": app_id or _query_id(df.sparkSession),
        "app.version": str(batch_id),
    }
    parsed = write_options(all_options)
    column = parsed.sequence_column
    if column is not None and not _compares_versions(parsed):
        df = df.orderBy(df[column])
    df.write.format(FORMAT).options(**all_options).mode("append").save()


def _query_id(spark: SparkSession) -> str:
    try:
        query_id = spark.sparkContext.getLocalProperty(QUERY_ID)
    except Exception:  # noqa: BLE001 - Spark Connect has no context, and raises various errors
        query_id = None
    if query_id is None:
        raise InvalidRequestError(
            "write_batch does not know which query it writes for (outside foreachBatch, or under"
            " Spark Connect): give app_id"
        )
    return query_id


def _compares_versions(options: WriteOptions) -> bool:
    client = client_for(options.connection.endpoint, options.connection.token)
    try:
        info = client.describe_table(str(options.connection.name.path))
    except NotFoundError:
        return options.properties.get("table.merge-engine", "").strip().lower() == "versioned"
    return info.descriptor.merge_rules().version_column is not None
