"""The public functions: `lookup_join` for a DataFrame, `register_lookup` for SQL."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.types import DataType, StructField, StructType

from streamhouse.connector._arrow_maps import mapped_in_arrow
from streamhouse.connector._partition_reader import spark_iterator_errors
from streamhouse.connector._spark_versions import (
    arrow_function,
    from_arrow_schema,
    has_arrow_functions,
    to_arrow_schema,
)
from streamhouse.connector.lookup._joined_batches import (
    joined,
    joined_structs,
    joined_values,
    looked_up_by,
)
from streamhouse.connector.lookup._lookup_plan import (
    CACHE_BYTES,
    INNER,
    LEFT,
    LookupPlan,
    check_key_types,
    key_order,
    looked_up,
    planned,
    resolved,
)
from streamhouse.connector.lookup._row_source import RowSource
from streamhouse.core.errors import (
    InvalidNameError,
    InvalidRequestError,
    UnknownOptionError,
)
from streamhouse.core.model.table import TableInfo
from streamhouse.reading.options.connection import client_for, connection_options
from streamhouse.reading.options.options import as_options
from streamhouse.reading.options.quoted_names import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["joined_frame", "lookup_join", "register_lookup"]

_CONNECTION_OPTIONS: Final = ("endpoint", "token", "tls.ca", "read.from")


def lookup_join(
    df: DataFrame,
    table: str,
    on: str | Sequence[str] | Mapping[str, str],
    *,
    columns: Sequence[str] | Mapping[str, str] | None = None,
    how: str = LEFT,
    cache_ms: int = 0,
    cache_bytes: int | str = CACHE_BYTES,
    **options: Any,
) -> DataFrame:
    """Return `df` with columns of the primary key table's row that has the key of each row.

    Works for a batch and for a stream. Each task and each micro-batch sees all earlier writes. A
    null in a key matches nothing.

    Args:
        table: `database.table`.
        on: the DataFrame's column -> the table's, as in `{"user": "id"}`; names alone where both
            are called the same. The table's columns are its primary key or the first columns of the
            key. With a part of the key, the result has one row for each matching row of the table.
        columns: the table's columns to add, or column -> its name in the result; default: all but
            the columns of `on`.
        how: `left` keeps rows that match nothing, with nulls; `inner` leaves them out.
        cache_ms: how long a worker keeps looked-up rows for later tasks; 0: for the same task only.
        cache_bytes: the limit of the looked-up rows in memory, as in `128MiB`.
        options: `endpoint`, `token` and `tls.ca` of the service, as for a read; `read.from`: with
            `any` standbys among the endpoints answer lookups as well.
    """
    if how not in (LEFT, INNER):
        raise InvalidRequestError(f"lookup_join: how is '{LEFT}' or '{INNER}', not '{how}'")
    is_case_sensitive = _is_case_sensitive(df.sparkSession)
    info, connection = _table(table, options)
    table_names = {
        resolved(
            frame_name, df.columns, owner="the DataFrame",
            is_case_sensitive=is_case_sensitive,
        ): (
            resolved(
                table_name, info.schema.names, owner=f"table '{info.path}'",
                is_case_sensitive=is_case_sensitive,
            )
        )
        for frame_name, table_name in _pairs(on)
    }  # fmt: skip
    key = key_order(info, list(table_names.values()))
    frame_names = {table_name: frame_name for frame_name, table_name in table_names.items()}
    fields = to_arrow_schema(StructType([df.schema[name] for name in table_names]))
    check_key_types(info, {table_names[field.name]: field for field in fields})
    result_names = looked_up(info, columns, without=key, is_case_sensitive=is_case_sensitive)
    _check_names(df, result_names, info, is_case_sensitive=is_case_sensitive)
    plan = planned(
        info, connection, key, result_names,
        frame_columns=tuple(frame_names[name] for name in key), how=how,
        cache_ms=cache_ms, cache_bytes=cache_bytes,
        may_write_files=_may_write_files(df.sparkSession),
    )  # fmt: skip
    return joined_frame(df, plan)


def joined_frame(df: DataFrame, plan: LookupPlan) -> DataFrame:
    """Return the DataFrame with the looked-up columns of a plan at the end."""
    added = from_arrow_schema(plan.row_schema).fields if plan.shows_columns else []
    fields = [StructField(f.name, f.dataType, f.nullable or plan.how == LEFT) for f in added]
    if plan.is_whole_key and all(field.nullable for field in fields) and has_arrow_functions():
        return _with_function(df, plan, fields)
    schema = StructType([*df.schema.fields, *fields])

    @spark_iterator_errors
    def join(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return joined(batches, plan, looked_up_by(plan))

    return mapped_in_arrow(df, join, schema)


def _with_function(df: DataFrame, plan: LookupPlan, fields: Sequence[StructField]) -> DataFrame:
    """Return the same result, by a function of the key: all other columns stay in Spark.

    The result of a function is nullable. A plan with a column declared not nullable therefore uses
    `mapInArrow`, and so does a plan with several matches a row.
    """
    key = [df[quoted(name)] for name in plan.frame_columns]
    # Spark may call a deterministic function twice for a row, and the answers may differ.
    if plan.how == LEFT and len(fields) == 1:
        # A left join of one column needs no flag for a match, and Spark reads a value faster than
        # a struct.
        value = _value_function(plan).asNondeterministic()(*key)
        return df.select("*", value.alias(fields[0].name))
    row, column_names = "row", {name.lower() for name in [*df.columns, *(f.name for f in fields)]}
    while row in column_names:
        row = f"_{row}"
    looked_up_frame = df.select("*", _row_function(plan).asNondeterministic()(*key).alias(row))
    if plan.how == INNER:
        looked_up_frame = looked_up_frame.where(looked_up_frame[row].isNotNull())
    columns = [looked_up_frame[row].getField(field.name).alias(field.name) for field in fields]
    return looked_up_frame.select("*", *columns).drop(row)


def register_lookup(
    spark: SparkSession,
    table: str,
    name: str,
    *,
    columns: Sequence[str] | None = None,
    cache_ms: int = 0,
    cache_bytes: int | str = CACHE_BYTES,
    **options: Any,
) -> str:
    """Make a SQL function that returns the row of a key as a struct, or null; return its name.

    `SELECT l.*, lookup_user(l.user).name FROM l` after `register_lookup(spark, "dim.users",
    "lookup_user")`. The arguments of the function are the columns of the primary key, in the key's
    order. The other parameters are as for `lookup_join`. Columns added to the table later are not
    in the struct.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise InvalidNameError(
            f"'{name}' is no name of a SQL function: use letters, digits and underscores"
        )
    info, connection = _table(table, options)
    key = key_order(info, list(info.descriptor.primary_key if info.is_primary_key_table else ()))
    result_names = looked_up(info, columns, without=(), is_case_sensitive=_is_case_sensitive(spark))
    if not result_names:
        raise InvalidRequestError(f"register_lookup of '{info.path}': name at least one column")
    plan = planned(
        info, connection, key, result_names,
        frame_columns=key, how=LEFT, cache_ms=cache_ms, cache_bytes=cache_bytes,
        may_write_files=_may_write_files(spark),
    )  # fmt: skip
    spark.udf.register(name, _row_function(plan))
    return name


def _row_function(plan: LookupPlan) -> Any:
    """Return the Spark function that makes a struct, or null, of a whole key."""
    fields = from_arrow_schema(plan.row_schema).fields
    returned = StructType([StructField(f.name, f.dataType) for f in fields])
    return _function(plan, joined_structs, returned)


def _value_function(plan: LookupPlan) -> Any:
    """Return the Spark function that makes the only looked-up value, or null, of a key."""
    (field,) = from_arrow_schema(plan.row_schema).fields
    return _function(plan, joined_values, field.dataType)


def _function(
    plan: LookupPlan,
    values_of: Callable[[Iterator[pa.RecordBatch], LookupPlan, RowSource], Iterator[pa.Array]],
    returned: DataType,
) -> Any:
    # Spark chooses the kind of call by the annotations of the function.
    @spark_iterator_errors
    def look_up(keys: Iterator[pa.Array]) -> Iterator[pa.Array]:
        return values_of(_as_batches(plan, keys), plan, looked_up_by(plan))

    @spark_iterator_errors
    def look_up_parts(keys: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        return values_of(_as_batches(plan, keys), plan, looked_up_by(plan))

    chosen: Any = look_up if len(plan.frame_columns) == 1 else look_up_parts
    return arrow_function(chosen, returned, purpose="register_lookup")


def _as_batches(plan: LookupPlan, calls: Iterator[Any]) -> Iterator[pa.RecordBatch]:
    """Yield the arguments of calls as rows; Spark passes a lone array or a tuple of arrays."""
    for call in calls:
        arrays = list(call) if isinstance(call, tuple) else [call]
        if len(arrays) != len(plan.frame_columns):
            raise InvalidRequestError(
                f"a lookup in '{plan.table}' takes its key ({', '.join(plan.frame_columns)}), so"
                f" {len(plan.frame_columns)} arguments, not {len(arrays)}"
            )
        yield pa.RecordBatch.from_arrays(arrays, names=list(plan.frame_columns))


def _pairs(on: str | Sequence[str] | Mapping[str, str]) -> list[tuple[str, str]]:
    if isinstance(on, str):
        return [(on, on)]
    if isinstance(on, Mapping):
        return [(str(frame_name), str(table_name)) for frame_name, table_name in on.items()]
    return [(name, name) for name in on]


def _table(table: str, options: Mapping[str, Any]) -> tuple[TableInfo, tuple[str, str | None]]:
    """Return the table's description, and the endpoint and token of its service."""
    all_options = as_options(options)
    for key in all_options:
        if key.lower() not in _CONNECTION_OPTIONS:
            raise UnknownOptionError(
                f"a lookup has no option '{key}' (options: {', '.join(_CONNECTION_OPTIONS)})"
            )
    connection = connection_options(all_options | {"table": table})
    if connection.name.part:
        raise InvalidRequestError(
            f"rows are looked up in '{connection.name.path}', not in its part"
            f" '${connection.name.part}'"
        )
    client = client_for(connection.endpoint, connection.token)
    info = client.describe_table(str(connection.name.path))
    return info, (connection.endpoint, connection.token)


def _check_names(
    df: DataFrame, result_names: Mapping[str, str], info: TableInfo, *, is_case_sensitive: bool
) -> None:
    """Raise if two columns of the result would have the same name."""

    def folded(name: str) -> str:
        return name if is_case_sensitive else name.lower()

    seen = {folded(name) for name in df.columns}
    for column, name in result_names.items():
        if folded(name) in seen:
            raise InvalidRequestError(
                f"lookup_join with '{info.path}': the result would have two columns '{name}'; give"
                f" the table's another name: columns={{'{column}': '{info.path.table}_{column}'}}"
            )
        seen.add(folded(name))


def _is_case_sensitive(spark: SparkSession) -> bool:
    return (spark.conf.get("spark.sql.caseSensitive", "false") or "false").lower() == "true"


def _may_write_files(spark: SparkSession) -> bool:
    """Return whether Spark allows unencrypted rows in local files."""
    return (spark.conf.get("spark.io.encryption.enabled", "false") or "false").lower() != "true"
