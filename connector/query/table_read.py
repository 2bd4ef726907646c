"""`streamhouse.read`: a table as a DataFrame, read only when the use of the rows is known.

Each transformation makes a new `TableRead`, which remembers how to make its DataFrame. All
remaining methods, for example `collect` and `write`, make the DataFrame, over the columns and rows
needed by the transformations.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from streamhouse.connector.names._wrapped_methods import has_jvm
from streamhouse.connector.query._narrowing import Build, NarrowedQuery, QueryTable, narrowed
from streamhouse.connector.query._plan_needs import each
from streamhouse.reading.options.options import BATCH, as_options, check_keys
from streamhouse.reading.options.quoted_names import quoted

__all__ = ["GroupedRead", "TableRead", "read"]

_TRANSFORMATIONS: Final = frozenset(
    {
        "agg",
        "alias",
        "coalesce",
        "crossJoin",
        "distinct",
        "drop",
        "dropDuplicates",
        "drop_duplicates",
        "dropna",
        "exceptAll",
        "fillna",
        "filter",
        "hint",
        "intersect",
        "intersectAll",
        "join",
        "limit",
        "offset",
        "orderBy",
        "repartition",
        "select",
        "selectExpr",
        "sort",
        "sortWithinPartitions",
        "subtract",
        "union",
        "unionAll",
        "unionByName",
        "unpivot",
        "where",
        "withColumn",
        "withColumnRenamed",
        "withColumns",
        "withColumnsRenamed",
    }
)
_KEEPING: Final = frozenset(
    {
        "coalesce",
        "distinct",
        "dropDuplicates",
        "drop_duplicates",
        "filter",
        "hint",
        "limit",
        "offset",
        "orderBy",
        "repartition",
        "sort",
        "sortWithinPartitions",
        "where",
    }
)
"""Transformations that keep the columns unchanged."""
_GROUPINGS: Final = frozenset({"cube", "groupBy", "groupby", "rollup"})
_GROUPED: Final = frozenset({"agg", "avg", "count", "max", "mean", "min", "sum"})


def read(spark: SparkSession, table: str, **options: Any) -> TableRead:
    """Return a table as a DataFrame that reads only relevant columns and rows.

    `select`, `where`, `groupBy`, `join` and the like determine the needs, also of several tables.
    Each statement on the result reads the newest rows. `explain()` first shows the read of each
    table.

    Args:
        spark: the session.
        table: `database.table`, or a part of it as in `database.table$lake`.
        options: options of the format, as in `asOfTimestamp="2026-11-20"`.
    """
    all_options = check_keys(as_options(options), uses=(BATCH,))
    query_table = QueryTable(spark, table, all_options)
    return TableRead(
        (query_table,), lambda frames: frames[0].alias(query_table.alias), whole=query_table
    )


class TableRead:
    """A lazy DataFrame: it has all methods of a DataFrame, and is accepted in the place of a
    DataFrame.

    `table["name"]` and `table.name` are the table's column, also if a joined table has the same
    name. `whole` is the table whose columns this read has, all and unchanged.
    """

    def __init__(
        self, tables: tuple[QueryTable, ...], build: Build, *, whole: QueryTable | None = None
    ) -> None:
        self._tables = tables
        self._build = build
        self._whole = whole

    @functools.cached_property
    def _query(self) -> NarrowedQuery:
        return narrowed(self._tables, self._build)

    @functools.cached_property
    def _stand_in(self) -> DataFrame:
        return self._build([table.stand_in for table in self._tables])

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self._stand_in.columns)

    def count(self) -> int:
        """Return the number of rows; all rows of a table are counted from the table's positions."""
        rows = self.groupBy().count().collect()
        return int(rows[0][0])

    def explain(self, *arguments: Any, **named: Any) -> None:
        """Print the read of each table, and Spark's plan."""
        sys.stdout.write(f"{self._query}\n")
        self._query.frame.explain(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_tables", "_build", "_whole"):
            raise AttributeError(f"a table has no attribute '{name}'")
        if name in _TRANSFORMATIONS:
            return functools.partial(self._transformed, name)
        if name in _GROUPINGS:
            return functools.partial(self._grouped, name)
        if not name.startswith("_") and name in self.columns:
            return self[name]
        return getattr(self._query.frame, name)

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, str):
            return F.col(self._qualified(item))
        if isinstance(item, Column):
            return self.where(item)
        return self.select(*item) if isinstance(item, list | tuple) else self._query.frame[item]

    def _qualified(self, name: str) -> str:
        """Return a column's name with its table's, if the column is still the table's own."""
        if not has_jvm(self._tables[0].spark):
            # Without a JVM the origin of a column is known only for a whole table.
            whole = self._whole
            if whole is None or name.lower() not in map(str.lower, whole.row_schema.names):
                return name
            return f"{whole.alias}.{quoted(name)}"
        output = each(self._stand_in._jdf.queryExecution().analyzed().output())
        aliases = {table.alias for table in self._tables}
        columns = [column for column in output if column.name().lower() == name.lower()]
        if len(columns) == 1:
            qualifier = ".".join(each(columns[0].qualifier()))
            return f"{qualifier}.{quoted(name)}" if qualifier in aliases else quoted(name)
        return name

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a table cannot be iterated; use collect() or toLocalIterator()")

    def __dir__(self) -> list[str]:
        return sorted({*dir(DataFrame), *super().__dir__()})

    def __repr__(self) -> str:
        return f"TableRead({', '.join(table.name for table in self._tables)})"

    # Spark's own methods check that an argument is a DataFrame.
    __class__ = property(lambda _self: DataFrame)

    def _transformed(self, name: str, *arguments: Any, **named: Any) -> Any:
        call = _Call.of(self._tables, arguments, named)

        def build(frames: Sequence[DataFrame]) -> DataFrame:
            frame = self._build(frames[: len(self._tables)])
            transformed: DataFrame = getattr(frame, name)(
                *call.arguments(frames), **call.named(frames)
            )
            return transformed

        whole = self._whole if name in _KEEPING else None
        return self._checked(call, build, lambda: getattr(self._query.frame, name), whole)

    def _grouped(self, name: str, *arguments: Any, **named: Any) -> GroupedRead:
        def group(frame: DataFrame) -> Any:
            return getattr(frame, name)(*arguments, **named)

        return GroupedRead(self, group)

    def _checked(
        self,
        call: _Call,
        build: Build,
        plain: Callable[[], Any],
        whole: QueryTable | None = None,
    ) -> Any:
        """Return the read of `build`, or a DataFrame if the stand-ins do not allow the call.

        A column of a certain DataFrame, as `frame["id"]`, is unknown to the stand-ins.
        """
        table = TableRead(call.tables, build, whole=whole)
        try:
            table._stand_in  # noqa: B018 - making it is the check
        except PySparkException:
            return plain()(*call.plain, **call.plain_named)
        return table


class GroupedRead:
    """The result of `groupBy`, `cube` and `rollup` of a `TableRead`."""

    def __init__(self, table: TableRead, group: Callable[[DataFrame], Any]) -> None:
        self._table = table
        self._group = group

    def __getattr__(self, name: str) -> Any:
        if name in _GROUPED:
            return functools.partial(self._aggregated, name)
        return getattr(self._group(self._table._query.frame), name)

    def _aggregated(self, name: str, *arguments: Any, **named: Any) -> Any:
        table = self._table

        def build(frames: Sequence[DataFrame]) -> DataFrame:
            aggregated: DataFrame = getattr(self._group(table._build(frames)), name)(
                *arguments, **named
            )
            return aggregated

        call = _Call.of(table._tables, arguments, named)
        return table._checked(call, build, lambda: getattr(self._group(table._query.frame), name))


@dataclass(frozen=True)
class _Call:
    """The arguments of a transformation; reads among the arguments add tables of their own."""

    tables: tuple[QueryTable, ...]
    plain: tuple[Any, ...]
    plain_named: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        own_tables: tuple[QueryTable, ...],
        arguments: tuple[Any, ...],
        named: Mapping[str, Any],
    ) -> _Call:
        tables = list(own_tables)
        for value in (*arguments, *named.values()):
            if _is_read(value):
                tables += [table for table in value._tables if table not in tables]
        return cls(tuple(tables), arguments, named)

    def arguments(self, frames: Sequence[DataFrame]) -> list[Any]:
        """Return the positional arguments, with DataFrames over `frames` for reads."""
        return [self._over(value, frames) for value in self.plain]

    def named(self, frames: Sequence[DataFrame]) -> dict[str, Any]:
        """Return the named arguments, with DataFrames over `frames` for reads."""
        return {key: self._over(value, frames) for key, value in self.plain_named.items()}

    def _over(self, value: Any, frames: Sequence[DataFrame]) -> Any:
        if not _is_read(value):
            return value
        places = dict(zip(self.tables, frames, strict=True))
        return value._build([places[table] for table in value._tables])


def _is_read(value: Any) -> bool:
    return type(value) is TableRead
