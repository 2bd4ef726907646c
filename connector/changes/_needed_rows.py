"""The rows of a table that a change needs, found by their keys where the keys are known.

- a merge by the primary key looks up the keys of its source, each once a task
- an update or a delete whose condition fixes the primary key looks these keys up
- any other condition is given to the read, which takes only the columns and rows it needs

A looked-up row is as new as its lookup, so it may be newer than the positions that the commit
names, never older: these are taken before. If it is changed after them the commit is a conflict.
So is a row that was not there and is by then, because a key that is written counts, not a row.
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
from streamhouse.connector.format._spark_readers import session_zone
from streamhouse.connector.lookup._lookup_plan import INNER, LEFT, planned
from streamhouse.connector.lookup.lookup_join import joined_frame
from streamhouse.connector.query._narrowing import Build, QueryTable, narrowed, needs_by_text
from streamhouse.connector.query._plan_needs import PlanNeeds
from streamhouse.connector.query._statement import Statement
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
"""Columns of a joined row that are null where that side has no row."""

_KEYS_MAX: Final = 10_000
"""A condition that fixes more keys is given to the read."""
_ALWAYS_LOOKED_UP: Final = 20_000
_READ_SHARE: Final = 4
"""A source that has more rows than one of so many of the table is joined with the whole table."""
_STATISTICS_MAX: Final = 1 << 60
"""Spark says more bytes than that of what it does not know."""


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
    """Return each row of `source` with the row of the table that has its key; None to join instead.

    `equalities` are the table's key columns -> the source's, which are converted without loss. The
    sides are two structs with the
    names of the aliases; a column that only one side has is there by its own name, too. Without
    `needs_columns` the table's side has the key alone.
    """
    info = assignment.info
    try:
        check_spark_types(source.schema, table=str(info.path))
    except StreamhouseError:
        # What tables cannot hold may still be joined by Spark.
        return None
    key = info.descriptor.primary_key
    names = list(source.columns)
    given = source.toDF(*[f"s{number}" for number in range(len(names))])
    keys = []
    for number, name in enumerate(key):
        places = [i for i, own in enumerate(names) if own.lower() == equalities[name].lower()]
        if len(places) != 1:
            return None
        place = places[0]
        column = assignment.key(name, F.col(f"s{place}"), given.schema[place].dataType)
        if column is None:
            return None
        keys.append(column.alias(f"k{number}"))
    if _is_large(source, info, connection):
        return None
    own = list(info.schema.names) if needs_columns else list(key)
    plan = planned(
        info,
        (connection.endpoint, connection.token),
        key,
        {name: f"t{number}" for number, name in enumerate(own)},
        frame_columns=tuple(f"k{number}" for number in range(len(key))),
        how=LEFT if keeps_unmatched else INNER,
    )
    pairs = joined_frame(given.select("*", *keys), plan)
    sides = {
        source_alias: [(F.col(f"s{number}"), name) for number, name in enumerate(names)],
        target_alias: [(F.col(f"t{number}"), name) for number, name in enumerate(own)],
    }
    taken = [name.lower() for side in sides.values() for _, name in side]
    alone = [
        column.alias(name)
        for side in sides.values()
        for column, name in side
        if taken.count(name.lower()) == 1
    ]
    is_there = F.col(f"t{own.index(key[0])}").isNotNull()
    return pairs.select(
        *(
            F.struct(*[column.alias(name) for column, name in side]).alias(alias)
            for alias, side in sides.items()
        ),
        *alone,
        F.lit(True).alias(IN_SOURCE),
        F.when(is_there, F.lit(True)).alias(IN_TARGET),
    )


def with_existing(
    rows: DataFrame, info: TableInfo, connection: ConnectionOptions, *, mark: str
) -> DataFrame:
    """Return `rows`, which have the primary key, with a column `mark`: null where no row has it."""
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
    """Whether Spark knows that `source` has so many rows that reading the table costs less."""
    made = getattr(source, "_jdf", None)
    if made is None:
        return False
    try:
        found = made.queryExecution().optimizedPlan().stats()
        counted, size = found.rowCount(), int(found.sizeInBytes())
        width = max(int(made.schema().defaultSize()), 1)
        rows = int(counted.get()) if counted.isDefined() else size // width
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
) -> DataFrame:
    """Return what `build` makes of the table, of which only the needed rows and columns are read.

    `options` are those of a read. Where Spark's planner cannot be asked, under Spark Connect, what
    is needed is `columns`, and rows for which the SQL text `where` may be true.
    """
    given = {key: value for key, value in options.items() if key != "table"}
    table = QueryTable(spark, str(info.path), given)

    def by_text() -> PlanNeeds | None:
        if where is None:
            return None
        name = tuple(str(info.path).split("."))
        # A comment at the end of the condition ends with its line.
        text = (
            f"SELECT {', '.join(map(quoted, columns))} FROM {'.'.join(map(quoted, name))}"
            f" WHERE ({where}\n)"
        )
        return needs_by_text(spark, Statement.of(text), {name: table})

    query = narrowed([table], build, by_text)
    (pushed,) = query.pushed
    keys = None if pushed.where is None else _keys_of(spark, pushed.where, info)
    if keys is None:
        return query.frame
    return build([_rows_with(spark, keys, info, connection, table.plain.schema, pushed.columns)])


def _keys_of(spark: SparkSession, where: str, info: TableInfo) -> pa.Table | None:
    """Return the primary keys of all rows for which a predicate may be true, if it names them."""
    key = info.descriptor.primary_key
    zone = spark_zone(session_zone(spark)[ZONE_MARK], name="the time zone")
    try:
        predicate = parse_predicate(where, info.schema, table=str(info.path), zone=zone)
    except StreamhouseError:
        return None
    found = fixed_keys(predicate.root, key)
    if found is None:
        return None
    schema = info.schema.select(list(key), table=str(info.path)).to_arrow()
    columns = [pa.array([row[i] for row in found], f.type) for i, f in enumerate(schema)]
    return pa.table(columns, names=[f"k{number}" for number in range(len(key))])


def fixed_keys(
    node: Node, key: Sequence[str], *, keys_max: int = _KEYS_MAX
) -> list[tuple[Any, ...]] | None:
    """Return the keys of all rows for which a predicate may be true, each once; None for any key.

    None is also the answer for more than `keys_max`.
    """
    found = _fixed(node, tuple(key), keys_max)
    return None if found is None else list(dict.fromkeys(found))


def _fixed(node: Node, key: tuple[str, ...], keys_max: int) -> list[tuple[Any, ...]] | None:
    match node:
        case Constant(value) if value is not True:
            return []
        case Or(children):
            return _together((_fixed(child, key, keys_max) for child in children), keys_max)
        case And() | Compare() | In():
            children = node.children if isinstance(node, And) else (node,)
            return _all_true(children, key, keys_max)
    return None


def _together(
    parts: Iterable[list[tuple[Any, ...]] | None], keys_max: int
) -> list[tuple[Any, ...]] | None:
    found: list[tuple[Any, ...]] = []
    for part in parts:
        if part is None or len(found) + len(part) > keys_max:
            return None
        found += part
    return found


def _all_true(
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
                # One that names keys by itself is enough.
                alone = _fixed(child, key, keys_max)
                if alone is not None:
                    return alone
                continue
            case _:
                continue
        before = values.get(column.path[0], named)
        values[column.path[0]] = [value for value in dict.fromkeys(named) if value in before]
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
    """Return the rows with these keys, in the table's form; columns but `columns` are null."""
    read = list(info.schema.names if columns is None else columns)
    plan = planned(
        info,
        (connection.endpoint, connection.token),
        info.descriptor.primary_key,
        {name: f"t{number}" for number, name in enumerate(read)},
        frame_columns=tuple(keys.column_names),
        how=INNER,
    )
    found = joined_frame(spark.createDataFrame(keys), plan)
    return found.select(
        *(
            F.col(f"t{read.index(field.name)}").alias(field.name)
            if field.name in read
            else F.lit(None).cast(field.dataType).alias(field.name)
            for field in schema.fields
        )
    )
