"""The rows of a table that a change needs, looked up by key if the keys are known.

- a merge by the primary key looks up each key of its source once a task
- an update or a delete whose condition fixes the primary key looks these keys up
- any other condition goes to the read, which takes only the columns and rows it needs

The positions that the commit names are taken before the lookups. So a looked-up row is as new as
the positions or newer, and never older. If the row changes after the positions, the commit is a
conflict. An insert of the missing row in the meantime is a conflict too, because conflicts are
found by the written keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # it has no types
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from streamhouse.connector.changes._assigned_values import Assignment
from streamhouse.connector.changes._commit import ComputedRows
from streamhouse.connector.format._spark_readers import session_zone
from streamhouse.connector.lookup._lookup_plan import INNER, LEFT, planned
from streamhouse.connector.lookup.lookup_join import joined_frame
from streamhouse.connector.query._narrowing import Build, QueryTable, narrowed, needs_by_text
from streamhouse.connector.query._plan_needs import PlanNeeds
from streamhouse.connector.query._query_text import QueryText
from streamhouse.connector.write._spark_types import check_spark_types
from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.values.zone import spark_zone
from streamhouse.reading.options.connection import ConnectionOptions, client_for
from streamhouse.reading.options.options import ZONE_MARK
from streamhouse.reading.options.quoted_names import quoted
from streamhouse.reading.where.parser import parse_predicate
from streamhouse.reading.where.predicate import And, Compare, Constant, In, Node, Or

__all__ = [
    "IN_SOURCE",
    "IN_TARGET",
    "fixed_keys",
    "matched_by_key",
    "rows_for",
    "with_existing",
]

IN_TARGET: Final = "__in_target"
IN_SOURCE: Final = "__in_source"
"""Columns of a joined row that are null if the side has no row."""

_KEYS_MAX: Final = 10_000
"""A condition that fixes more keys goes to the read."""
_ALWAYS_LOOKED_UP: Final = 20_000
_READ_SHARE: Final = 4
"""A source with more rows than the table's rows divided by this number is joined with the table."""
_STATISTICS_MAX: Final = 1 << 60
"""Spark reports more bytes than this for an unknown size."""


def matched_by_key(
    source: DataFrame,
    assignment: Assignment,
    connection: ConnectionOptions,
    *,
    equalities: Mapping[str, str],
    source_alias: str,
    target_alias: str,
    keeps_unmatched: bool,
    needs_columns: bool,
) -> DataFrame | None:
    """Return each row of `source` with the table's row of its key; None if the caller has to join.

    `equalities` are the table's key columns -> the source's columns. The sides are two structs with
    the names of the aliases; a column of only one side is also a column of the result. Without
    `needs_columns` the table's side has the key alone.
    """
    info = assignment.info
    try:
        check_spark_types(source.schema, table=str(info.path))
    except StreamhouseError:
        # Spark can join types that tables cannot hold.
        return None
    key = info.descriptor.primary_key
    names = list(source.columns)
    numbered = source.toDF(*[f"s{number}" for number in range(len(names))])
    keys = []
    for number, name in enumerate(key):
        source_name = equalities[name].lower()
        places = [i for i, column_name in enumerate(names) if column_name.lower() == source_name]
        if len(places) != 1:
            return None
        place = places[0]
        column = assignment.key(name, F.col(f"s{place}"), numbered.schema[place].dataType)
        if column is None:
            return None
        keys.append(column.alias(f"k{number}"))
    if _is_large(source, info, connection):
        return None
    table_columns = list(info.schema.names) if needs_columns else list(key)
    plan = planned(
        info,
        (connection.endpoint, connection.token),
        key,
        {name: f"t{number}" for number, name in enumerate(table_columns)},
        frame_columns=tuple(f"k{number}" for number in range(len(key))),
        how=LEFT if keeps_unmatched else INNER,
    )
    pairs = joined_frame(numbered.select("*", *keys), plan)
    sides = {
        source_alias: [(F.col(f"s{number}"), name) for number, name in enumerate(names)],
        target_alias: [(F.col(f"t{number}"), name) for number, name in enumerate(table_columns)],
    }
    lower_names = [name.lower() for side in sides.values() for _, name in side]
    alone = [
        column.alias(name)
        for side in sides.values()
        for column, name in side
        if lower_names.count(name.lower()) == 1
    ]
    is_in_target = F.col(f"t{table_columns.index(key[0])}").isNotNull()
    return pairs.select(
        *(
            F.struct(*[column.alias(name) for column, name in side]).alias(alias)
            for alias, side in sides.items()
        ),
        *alone,
        F.lit(True).alias(IN_SOURCE),
        F.when(is_in_target, F.lit(True)).alias(IN_TARGET),
    )


def with_existing(
    rows: DataFrame, info: TableInfo, connection: ConnectionOptions, *, mark: str
) -> DataFrame:
    """Return `rows`, which have the primary key, with a column `mark`: null for a new key."""
    key = info.descriptor.primary_key
    plan = planned(
        info,
        (connection.endpoint, connection.token),
        key,
        {key[0]: mark},
        frame_columns=key,
        how=LEFT,
    )
    return joined_frame(rows, plan)


def _is_large(source: DataFrame, info: TableInfo, connection: ConnectionOptions) -> bool:
    """Whether reading the table costs less, by Spark's statistics of `source`."""
    java_frame = getattr(source, "_jdf", None)
    if java_frame is None:
        return False
    try:
        statistics = java_frame.queryExecution().optimizedPlan().stats()
        row_count, size = statistics.rowCount(), int(statistics.sizeInBytes())
        width = max(int(java_frame.schema().defaultSize()), 1)
        rows = int(row_count.get()) if row_count.isDefined() else size // width
    except (Py4JError, PySparkException):
        return False
    if rows <= _ALWAYS_LOOKED_UP or size >= _STATISTICS_MAX:
        return False
    client = client_for(connection.endpoint, connection.token)
    return rows * _READ_SHARE >= client.count(str(info.path))


# -- updates and deletes ---------------------------------------------------------------------------


def rows_for(
    spark: SparkSession,
    options: Mapping[str, str],
    info: TableInfo,
    connection: ConnectionOptions,
    build: Build,
    *,
    columns: Sequence[str],
    where: str | None,
    alias: str | None,
) -> ComputedRows:
    """Return the result of `build` for the table, reading only the needed rows and columns.

    `alias` is the table's name in `build` and `where`.

    `options` are the options of a read. Under Spark Connect the planner is out of reach; the needs
    are `columns` and the rows for which the SQL text `where` may be true.
    """
    read_options = {key: value for key, value in options.items() if key != "table"}
    table = QueryTable(spark, str(info.path), read_options)

    def by_text() -> PlanNeeds | None:
        if where is None:
            return None
        name = tuple(str(info.path).split("."))
        relation = ".".join(map(quoted, name))
        if alias is not None:
            relation += f" AS {quoted(alias)}"
        # A comment at the end of the condition ends with its line.
        text = f"SELECT {', '.join(map(quoted, columns))} FROM {relation} WHERE ({where}\n)"
        return needs_by_text(spark, QueryText.of(text), {name: table})

    def aliased(frames: Sequence[DataFrame]) -> DataFrame:
        return build(frames if alias is None else [frames[0].alias(alias)])

    query = narrowed([table], aliased, by_text)
    (pushed,) = query.pushed
    keys = None if pushed.where is None else _keys_of(spark, pushed.where, info)
    if keys is None:
        return ComputedRows(query.frame, pushed)
    rows = _rows_with(spark, keys, info, connection, table.plain.schema, pushed.columns)
    return ComputedRows(aliased([rows]), f"{keys.num_rows} keys, looked up at the service")


def _keys_of(spark: SparkSession, where: str, info: TableInfo) -> pa.Table | None:
    """Return the primary keys of all rows for which a predicate may be true, None for any key."""
    key = info.descriptor.primary_key
    zone = spark_zone(session_zone(spark)[ZONE_MARK], name="the time zone")
    try:
        predicate = parse_predicate(where, info.schema, table=str(info.path), zone=zone)
    except StreamhouseError:
        return None
    keys = fixed_keys(predicate.root, key)
    if keys is None:
        return None
    schema = info.schema.select(list(key), table=str(info.path)).to_arrow()
    columns = [pa.array([row[i] for row in keys], f.type) for i, f in enumerate(schema)]
    return pa.table(columns, names=[f"k{number}" for number in range(len(key))])


def fixed_keys(
    node: Node, key: Sequence[str], *, keys_max: int = _KEYS_MAX
) -> list[tuple[Any, ...]] | None:
    """Return the distinct keys of all rows for which a predicate may be true; None for any key.

    More than `keys_max` keys give None too.
    """
    keys = _fixed(node, tuple(key), keys_max)
    return None if keys is None else list(dict.fromkeys(keys))


def _fixed(node: Node, key: tuple[str, ...], keys_max: int) -> list[tuple[Any, ...]] | None:
    match node:
        case Constant(value) if value is not True:
            return []
        case Or(children):
            return _union((_fixed(child, key, keys_max) for child in children), keys_max)
        case And() | Compare() | In():
            children = node.children if isinstance(node, And) else (node,)
            return _intersection(children, key, keys_max)
    return None


def _union(
    parts: Iterable[list[tuple[Any, ...]] | None], keys_max: int
) -> list[tuple[Any, ...]] | None:
    keys: list[tuple[Any, ...]] = []
    for part in parts:
        if part is None or len(keys) + len(part) > keys_max:
            return None
        keys += part
    return keys


def _intersection(
    children: Sequence[Node], key: tuple[str, ...], keys_max: int
) -> list[tuple[Any, ...]] | None:
    values: dict[str, list[Any]] = {}
    for child in children:
        match child:
            case Compare(column, "=", value) if len(column.path) == 1:
                named = (value,)
            case In(column, named) if len(column.path) == 1:
                pass
            case Or() | And() | Constant():
                # One child that fixes the keys is enough.
                alone = _fixed(child, key, keys_max)
                if alone is not None:
                    return alone
                continue
            case _:
                continue
        earlier_values = values.get(column.path[0], named)
        values[column.path[0]] = [
            value for value in dict.fromkeys(named) if value in earlier_values
        ]
    if not set(key) <= set(values):
        return None
    count = 1
    for name in key:
        count *= len(values[name])
    return None if count > keys_max else list(itertools.product(*(values[name] for name in key)))


def _rows_with(
    spark: SparkSession,
    keys: pa.Table,
    info: TableInfo,
    connection: ConnectionOptions,
    schema: StructType,
    columns: Sequence[str] | None,
) -> DataFrame:
    """Return the rows with these keys, in the table's schema; unread columns are null."""
    read = list(info.schema.names if columns is None else columns)
    plan = planned(
        info,
        (connection.endpoint, connection.token),
        info.descriptor.primary_key,
        {name: f"t{number}" for number, name in enumerate(read)},
        frame_columns=tuple(keys.column_names),
        how=INNER,
    )
    looked_up_frame = joined_frame(spark.createDataFrame(keys), plan)
    return looked_up_frame.select(
        *(
            F.col(f"t{read.index(field.name)}").alias(field.name)
            if field.name in read
            else F.lit(None).cast(field.dataType).alias(field.name)
            for field in schema.fields
        )
    )
