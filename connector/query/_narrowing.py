"""A table in a query: a stand-in for planning, and the read that the plan needs.

Invariants:
- a query reads a table once, however often the query uses the table: all uses see one cut. The read
  has the columns and rows that any use needs
- a narrowed table keeps names, order and types of all columns, so `*`, column lists and positions
  keep their meaning. An unneeded column is null
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # it has no types
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructType

from streamhouse.connector._spark_versions import from_arrow_schema
from streamhouse.connector.format.registration import register
from streamhouse.connector.names._wrapped_methods import has_jvm
from streamhouse.connector.query._plan_needs import KEY_OPTION, PlanNeeds, ScanNeeds, needs_of
from streamhouse.connector.query._query_text import QueryText
from streamhouse.connector.query._relation_needs import RelationTable, needs_of_relation
from streamhouse.connector.query._text_needs import TextTable, needs_of_text
from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableInfo
from streamhouse.reading.options.connection import TableName, client_for, connection_options
from streamhouse.reading.options.options import FORMAT, ROW_COUNT, ROW_COUNT_MARK, shape_options
from streamhouse.reading.options.quoted_names import quoted, quoted_list
from streamhouse.reading.plan.iceberg_read import source_state
from streamhouse.reading.plan.row_form import shape_columns
from streamhouse.reading.where.parser import parse_predicate

__all__ = ["NarrowedQuery", "QueryTable", "narrowed", "needs_by_text"]

WHERE_CHARACTERS_MAX: Final = 64 * 1024
"""A longer predicate costs more than it saves."""

_USUAL: Final = {
    "spark.sql.ansi.enabled": "true",
    "spark.sql.caseSensitive": "false",
    "spark.sql.timestampType": "TIMESTAMP_LTZ",
}
"""Settings of a session that reads names and literals, and compares, like the option `where`."""

_registered: Final[weakref.WeakSet[SparkSession]] = weakref.WeakSet()

Build = Callable[[Sequence[DataFrame]], DataFrame]
"""A query as a function of its tables."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """The read of a table: columns and predicate, None being all; or only a number of rows."""

    table: str
    columns: tuple[str, ...] | None = None
    where: str | None = None
    is_counted: bool = False

    def __str__(self) -> str:
        if self.is_counted:
            return f"{self.table}: number of rows, from positions where they tell"
        columns = "all columns" if self.columns is None else f"columns {', '.join(self.columns)}"
        rows = "all rows" if self.where is None else f"rows where {self.where}"
        return f"{self.table}: {columns}; {rows}"


@dataclass(frozen=True, slots=True)
class NarrowedQuery:
    """A query's DataFrame, and the read of each table."""

    frame: DataFrame
    pushed: tuple[Pushed, ...]

    def __str__(self) -> str:
        return "\n".join(["== Streamhouse: read of each table ==", *map(str, self.pushed), ""])


@dataclass(frozen=True, eq=False)
class QueryTable:
    """A table, or a part of a table, with the options of its read."""

    spark: SparkSession
    name: str
    options: Mapping[str, str]
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        if self.spark not in _registered:
            register(self.spark)
            _registered.add(self.spark)

    @property
    def alias(self) -> str:
        """A unique name for the table in a query."""
        return f"streamhouse_{self.key}"

    @functools.cached_property
    def schema(self) -> Schema:
        """The service's schema of the table; raises `NotFoundError` for a missing table."""
        return self._info.schema

    @functools.cached_property
    def _info(self) -> TableInfo:
        connection = connection_options({**self.options, "table": self.name})
        client = client_for(connection.endpoint, connection.token)
        if connection.name.is_iceberg:
            return source_state(client, connection.name, columns=None).table
        return client.table_state(str(connection.name.path)).table

    @functools.cached_property
    def row_schema(self) -> StructType:
        """The columns of the table's read, without Spark, which would start a Python process."""
        shape = shape_options({**self.options, "table": self.name})
        if shape.connection.name.is_metadata or shape.connection.name.is_iceberg:
            return self.plain.schema
        columns = shape_columns(self._info, shape)
        return from_arrow_schema(pa.schema([column.to_arrow() for column in columns]))

    @functools.cached_property
    def plain(self) -> DataFrame:
        """The table, read as a whole."""
        return self._load(self.options)

    @functools.cached_property
    def stand_in(self) -> DataFrame:
        """An empty DataFrame with the table's columns, so that Spark's planner shows the needs.

        Under Spark Connect the stand-in is the table itself: the planner is out of reach.
        """
        if not has_jvm(self.spark):
            return self.plain
        reader = self.spark.read.schema(self.row_schema).option(KEY_OPTION, self.key)
        return reader.parquet(_empty_directory())

    def narrowed(self, needs: PlanNeeds | None) -> tuple[DataFrame, Pushed]:
        """Return the table with only the columns and rows in `needs`, and a summary of the read."""
        scans = [] if needs is None else [scan for scan in needs.scans if scan.key == self.key]
        # A plan without a known scan of the stand-in may have an unknown one.
        if not scans or TableName.parse(self.name).is_metadata:
            return self.plain, Pushed(self.name)
        fields = self.row_schema.fields
        needed_columns = {name for scan in scans for name in scan.columns}
        columns = tuple(row_field.name for row_field in fields if row_field.name in needed_columns)
        columns = columns or (_cheapest(self.row_schema),)
        where = self._where(scans)
        if len(columns) == len(fields) and where is None:
            return self.plain, Pushed(self.name)
        options = {key: value for key, value in self.options.items() if key != "includemetadata"}
        options["columns"] = quoted_list(columns)
        table_predicate = self.options.get("where")
        if where is not None:
            options["where"] = (
                where if table_predicate is None else f"({table_predicate}) AND {where}"
            )
        frame = self._load(options)
        nothing = F.lit(None)
        # A cast is a call to the JVM.
        unread_types = {row_field.dataType for row_field in fields if row_field.name not in columns}
        nulls = {kind: nothing.cast(kind) for kind in unread_types}
        shown = [
            quoted(row_field.name)
            if row_field.name in columns
            else nulls[row_field.dataType].alias(row_field.name)
            for row_field in fields
        ]
        return frame.select(*shown), Pushed(self.name, columns, options.get("where"))

    def counted(self) -> tuple[DataFrame, Pushed]:
        """Return one row with the number of the table's rows, and a description of the read."""
        frame = self._load({**self.options, ROW_COUNT_MARK: "true"})
        total = F.coalesce(F.sum(ROW_COUNT), F.lit(0).cast("bigint"))
        return frame.agg(total), Pushed(self.name, where=self.options.get("where"), is_counted=True)

    @property
    def is_countable(self) -> bool:
        """Whether the rows can be counted without a read of their columns."""
        return not TableName.parse(self.name).is_metadata

    def _load(self, options: Mapping[str, str]) -> DataFrame:
        return self.spark.read.format(FORMAT).options(**options).load(self.name)

    def _where(self, scans: Sequence[ScanNeeds]) -> str | None:
        """Return a predicate for a superset of the rows that the scans need."""
        is_folded = "deduplicationmode" in map(str.lower, self.options)
        if is_folded or any(not scan.conditions for scan in scans):
            return None
        always = {f"isnotnull({quoted(c.name)})" for c in self.schema.columns if not c.nullable}
        alternatives = []
        for scan in scans:
            conditions = [c for c in scan.conditions if c not in always]
            understood = [c for c in conditions if _is_understood(c, self.schema, self.name)]
            if not understood:
                return None
            alternatives.append(" AND ".join(understood))
        distinct = list(dict.fromkeys(alternatives))
        text = (
            distinct[0]
            if len(distinct) == 1
            else " OR ".join(f"({predicate})" for predicate in distinct)
        )
        return f"({text})" if len(text) <= WHERE_CHARACTERS_MAX else None


def narrowed(
    tables: Sequence[QueryTable],
    build: Build,
    otherwise: Callable[[], PlanNeeds | None] = lambda: None,
) -> NarrowedQuery:
    """Return the query of `build` over tables that are read only as far as needed.

    `otherwise` returns the needs if Spark's planner does not. Under Spark Connect the needs can
    also come from the query's message to the server.
    """
    can_ask = has_jvm(tables[0].spark)
    needs = _needs(tables, build) if can_ask else None
    if needs is None:
        needs = otherwise()
    if needs is None and not can_ask:
        needs = _needs_by_relation(tables, build)
    by_key = {table.key: table for table in tables}
    if needs is not None and needs.counted is not None and by_key[needs.counted].is_countable:
        name = build([table.stand_in for table in tables]).columns[0]
        frame, pushed = by_key[needs.counted].counted()
        return NarrowedQuery(frame.toDF(name), (pushed,))
    narrowed_tables = [table.narrowed(needs) for table in tables]
    return NarrowedQuery(
        build([frame for frame, _ in narrowed_tables]), tuple(p for _, p in narrowed_tables)
    )


def needs_by_text(
    spark: SparkSession, statement: QueryText, tables: Mapping[tuple[str, ...], QueryTable]
) -> PlanNeeds | None:
    """Return the needs of a statement by its text, None if the text is not enough."""
    text_tables = {
        name: TextTable(table.key, tuple(table.row_schema.fieldNames()))
        for name, table in tables.items()
    }
    return needs_of_text(statement, text_tables, has_usual_literals=_has_usual_literals(spark))


def _has_usual_literals(spark: SparkSession) -> bool:
    return all(spark.conf.get(key, usual) == usual for key, usual in _USUAL.items())


def _needs(tables: Sequence[QueryTable], build: Build) -> PlanNeeds | None:
    """Return the needs of a query by Spark's planner; None if the planner fails."""
    try:
        return needs_of(build([table.stand_in for table in tables]))
    except (PySparkException, Py4JError):
        # A wrong query fails in the same way over the tables themselves.
        return None


def _needs_by_relation(tables: Sequence[QueryTable], build: Build) -> PlanNeeds | None:
    """Return the needs of a query under Spark Connect, by its message to the server."""

    def message(frame: Any) -> Any:
        return frame._plan.plan(frame.sparkSession.client)

    stand_ins = [table.stand_in for table in tables]
    relation_tables = {
        message(frame).common.plan_id: RelationTable(
            table.key, table.alias, tuple(table.row_schema.fieldNames())
        )
        for table, frame in zip(tables, stand_ins, strict=True)
    }
    try:
        relation = message(build(stand_ins))
    except PySparkException:
        return None
    usual = _has_usual_literals(tables[0].spark)
    return needs_of_relation(relation, relation_tables, has_usual_literals=usual)


def _is_understood(condition: str, schema: Schema, table: str) -> bool:
    try:
        parse_predicate(condition, schema, table=table)
    except StreamhouseError:
        return False
    return True


def _cheapest(schema: StructType) -> str:
    """Return the cheapest column, for a read without needed columns: the rows need a carrier."""

    def width(data_type: DataType) -> int:
        sizes: dict[str, Any] = {"boolean": 1, "tinyint": 1, "smallint": 2, "int": 4, "date": 4}
        name = data_type.simpleString()
        return int(sizes.get(name, 8 if name in ("bigint", "float", "double", "timestamp") else 99))

    return min(schema.fields, key=lambda each: width(each.dataType)).name


@functools.cache
def _empty_directory() -> str:
    path = tempfile.mkdtemp(prefix="streamhouse-stand-in-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path).as_uri()
