"""A merge: clauses that change rows with a match, and rows without a match.

The source is joined with the table. For each pair Spark finds the first clause whose condition is
true; a row without such a clause stays. Only changed rows are written. If rows match by the primary
key, the table's rows are looked up (`_needed_rows.py`) and the table is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from streamhouse.client.values.arguments import checked_calls
from streamhouse.connector.changes._assigned_values import Assignment, Case, types_of, values_of
from streamhouse.connector.changes._commit import (
    DELETED,
    INSERTED,
    PROBLEM_COLUMN,
    UPDATED,
    Changes,
    ComputedRows,
)
from streamhouse.connector.changes._expressions import (
    all_of,
    assignments,
    column_of,
    condition,
    first_of,
    key_equalities,
    named,
)
from streamhouse.connector.changes._needed_rows import (
    IN_SOURCE,
    IN_TARGET,
    matched_by_key,
    with_existing,
)
from streamhouse.connector.query._narrowing import Pushed
from streamhouse.core.errors import (
    InvalidRequestError,
    UnknownColumnError,
    UnsupportedError,
    suggestion,
)
from streamhouse.core.model.merge_engine import DeleteBehavior, MergeEngine
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.model.table import TableInfo
from streamhouse.reading.options.connection import ConnectionOptions
from streamhouse.reading.options.quoted_names import quoted

__all__ = ["Merge", "changed_rows", "check_changeable"]

_CLAUSE: Final = "__clause"
_EXISTS: Final = "__exists"

On = Column | str | Sequence[str] | Mapping[str, str] | None


class _Side(StrEnum):
    MATCHED = "when_matched"
    NOT_MATCHED = "when_not_matched"
    NOT_MATCHED_BY_SOURCE = "when_not_matched_by_source"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clause:
    """One clause; `values` None means all columns, with the source's values."""

    side: _Side
    kind: str
    condition: Column | str | None
    values: Mapping[str, Any] | None = None

    @property
    def method(self) -> str:
        verb = {INSERTED: "insert", UPDATED: "update", DELETED: "delete"}[self.kind]
        return f"{self.side}_{verb}"


@checked_calls
@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """A merge under construction: `Table.merge` begins the merge, `execute` runs it.

    The first clause whose condition is true changes the row. Conditions and values are SQL text or
    Spark columns, and name columns as `target.balance` and `source.balance`, or by the aliases of
    the call of `Table.merge`.
    """

    source: DataFrame
    on: On
    source_alias: str
    target_alias: str
    run: Callable[..., Changes]
    clauses: tuple[_Clause, ...] = ()

    def when_matched_update(
        self,
        set: Mapping[str, Any],  # noqa: A002 - the word of SQL
        condition: Column | str | None = None,
    ) -> Merge:
        """Change these columns of matching rows; the other columns stay."""
        return self._with(_Side.MATCHED, UPDATED, condition, set)

    def when_matched_update_all(self, condition: Column | str | None = None) -> Merge:
        """Set all columns of matching rows to the source's columns of the same name."""
        return self._with(_Side.MATCHED, UPDATED, condition, None)

    def when_matched_delete(self, condition: Column | str | None = None) -> Merge:
        """Delete matching rows."""
        return self._with(_Side.MATCHED, DELETED, condition)

    def when_not_matched_insert(
        self, values: Mapping[str, Any], condition: Column | str | None = None
    ) -> Merge:
        """Insert the source's rows without a match, with these values or nulls."""
        return self._with(_Side.NOT_MATCHED, INSERTED, condition, values)

    def when_not_matched_insert_all(self, condition: Column | str | None = None) -> Merge:
        """Insert the source's rows without a match, all columns by name."""
        return self._with(_Side.NOT_MATCHED, INSERTED, condition, None)

    def when_not_matched_by_source_update(
        self,
        set: Mapping[str, Any],  # noqa: A002 - the word of SQL
        condition: Column | str | None = None,
    ) -> Merge:
        """Change rows of the table that no row of the source matches."""
        return self._with(_Side.NOT_MATCHED_BY_SOURCE, UPDATED, condition, set)

    def when_not_matched_by_source_delete(self, condition: Column | str | None = None) -> Merge:
        """Delete rows of the table that no row of the source matches."""
        return self._with(_Side.NOT_MATCHED_BY_SOURCE, DELETED, condition)

    def execute(
        self,
        *,
        app_id: str | None = None,
        app_version: int | None = None,
        isolation: str = "snapshot",
    ) -> Changes:
        """Run the merge as one transaction; return the counts of changed rows.

        Args:
            app_id: with `app_version`, makes the merge happen once, also if the job is started
                again: the table skips a version that is not above the last version of `app_id`.
            isolation: `snapshot` repeats the merge if a different writer changed a row that the
                merge writes; `serializable` if a different writer changed any row of the table.
        """
        if not self.clauses:
            raise InvalidRequestError(
                "this merge has no clause, so it would change nothing; add one, as in"
                " .when_matched_update_all().when_not_matched_insert_all()"
            )
        return self.run(self, app_id=app_id, app_version=app_version, isolation=isolation)

    def _with(
        self,
        side: _Side,
        kind: str,
        condition: Column | str | None,
        values: Mapping[str, Any] | None = None,
    ) -> Merge:
        clause = _Clause(side=side, kind=kind, condition=condition, values=values)
        return replace(self, clauses=(*self.clauses, clause))


_APPENDED: Final = 'df.write.format("streamhouse").mode("append")'
_ENGINES: Final = {
    MergeEngine.FIRST_ROW: "the first row of a key stays and later ones are dropped. Insert rows"
    f" with {_APPENDED}, which leaves keys alone that are there",
    MergeEngine.VERSIONED: "of the rows of a key the one with the greatest version stays. Write"
    f" new versions with {_APPENDED}",
    MergeEngine.AGGREGATION: "a row is combined with the one that is there. Write the values to be"
    f" added with {_APPENDED}",
}
"""How each merge engine treats a written row, and the write to use instead."""


def check_changeable(info: TableInfo, *, operation: str, deletes: bool) -> None:
    """Raise `UnsupportedError` unless a written row replaces the row of its key."""
    table = str(info.path)
    if not info.is_primary_key_table:
        raise UnsupportedError(
            f"table '{table}' has no primary key, so {operation} has no key to find rows by; append"
            " to it, or create a table with option 'primary.key'"
        )
    rules = info.descriptor.merge_rules()
    if rules.engine is not MergeEngine.LAST_ROW:
        raise UnsupportedError(
            f"table '{table}' has table.merge-engine = {rules.engine}: {_ENGINES[rules.engine]}, so"
            f" {operation} would not take effect"
        )
    if deletes and rules.delete_behavior is not DeleteBehavior.ALLOW:
        raise UnsupportedError(
            f"table '{table}' has table.delete.behavior = {rules.delete_behavior}, so {operation}"
            " would delete nothing"
        )


def changed_rows(
    merge: Merge, target: DataFrame, assignment: Assignment, connection: ConnectionOptions
) -> ComputedRows:
    """Return the changed rows of a merge, in the form for `_commit.py`."""
    info = assignment.info
    deletes = any(clause.kind == DELETED for clause in merge.clauses)
    check_changeable(info, operation="a merge", deletes=deletes)
    key = list(info.descriptor.primary_key)
    equalities = _equalities(merge, key, str(info.path))
    if equalities is not None:
        on = _all_equal(merge, target, equalities, assignment)
    else:
        assert merge.on is None or isinstance(merge.on, Column | str)
        on = condition(merge.on)
    pairs = _looked_up(merge, assignment, connection, equalities)
    rows = None
    read: Pushed | str = "the keys of the source, looked up at the service"
    if pairs is not None:
        try:
            rows = _changed(merge, pairs, target.schema, assignment, equalities)
            rows.schema  # noqa: B018 - Spark Connect looks for columns only when it is asked
        except AnalysisException:
            # A column that belongs to a DataFrame, as `frame["id"]`, is resolved only by a join.
            rows = None
    if rows is None:
        try:
            joined = _joined(merge, target, on)
            rows = _changed(merge, joined, target.schema, assignment, equalities)
            rows.schema  # noqa: B018 - as above
        except AnalysisException as error:
            _refuse_unknown_column(merge, target, str(info.path), error)
            raise
        read = Pushed(str(info.path))
    are_new = all(_inserts_matched_key(merge, clause, equalities, key) for clause in merge.clauses)
    if not are_new:
        rows = with_existing(rows, info, connection, mark=_EXISTS)
    return ComputedRows(_checked(rows, key, str(info.path)), read, looks_up_inserts=not are_new)


def _refuse_unknown_column(
    merge: Merge, target: DataFrame, table: str, error: AnalysisException
) -> None:
    """Raise for a column that neither side has: Spark's sentence proposes our own columns."""
    name = (error.getMessageParameters() or {}).get("objectName")
    if name is None or not str(error.getCondition()).startswith("UNRESOLVED_COLUMN"):
        return
    sides = {merge.target_alias: target.columns, merge.source_alias: merge.source.columns}
    columns = [f"{alias}.{column}" for alias, names in sides.items() for column in names]
    written = name.replace("`", "")
    raise UnknownColumnError(
        f"table '{table}': the merge names column '{written}', which neither side has"
        f"{suggestion(written, columns)} (columns: {', '.join(columns)})"
    ) from error


def _changed(
    merge: Merge,
    pairs: DataFrame,
    schema: StructType,
    assignment: Assignment,
    equalities: dict[str, str] | None,
) -> DataFrame:
    """Return the changes that the clauses make of pairs of rows; other pairs are dropped."""
    info = assignment.info
    in_source, in_target = F.col(IN_SOURCE).isNotNull(), F.col(IN_TARGET).isNotNull()
    is_on_side = {
        _Side.MATCHED: in_source & in_target,
        _Side.NOT_MATCHED: in_source & ~in_target,
        _Side.NOT_MATCHED_BY_SOURCE: ~in_source & in_target,
    }
    first_clause = first_of(
        [
            (is_on_side[clause.side] & condition(clause.condition), F.lit(number))
            for number, clause in enumerate(merge.clauses)
        ],
        F.lit(None),
    )
    pairs_with_clause = pairs.withColumn(_CLAUSE, first_clause).filter(F.col(_CLAUSE).isNotNull())
    key = info.descriptor.primary_key
    only_deletes = all(clause.kind == DELETED for clause in merge.clauses)
    columns = list(key) if only_deletes else schema.names
    values = [_values(merge, clause, schema, info, equalities) for clause in merge.clauses]
    types = types_of(
        pairs_with_clause, [clause_values[name] for clause_values in values for name in columns]
    )
    cases: dict[str, list[Case]] = {name: [] for name in columns}
    problems: list[tuple[Column, Column]] = []
    for number, (clause, clause_values) in enumerate(zip(merge.clauses, values, strict=True)):
        is_of_clause = F.col(_CLAUSE) == F.lit(number)
        for place, name in enumerate(columns):
            value, data_type = clause_values[name], types[number * len(columns) + place]
            assignment.check(name, data_type)
            if clause.kind == INSERTED and name in key:
                exact = assignment.key(name, value, data_type)
                assert exact is not None, "the type was checked"
                is_lost = is_of_clause & value.isNotNull() & exact.isNull()
                problems.append((is_lost, _key_problem(assignment, clause, name, value)))
                value, data_type = exact, schema[name].dataType
            cases[name].append(Case(is_of_clause, value, data_type))
    kinds = [
        (F.col(_CLAUSE) == F.lit(number), F.lit(clause.kind))
        for number, clause in enumerate(merge.clauses)
    ]
    return pairs_with_clause.select(
        *(values_of(cases[name], schema[name].dataType).alias(name) for name in columns),
        first_of(kinds, F.lit(None)).alias(CHANGE_TYPE_COLUMN),
        first_of(problems, F.lit(None).cast("string")).alias(PROBLEM_COLUMN),
    )


def _key_problem(assignment: Assignment, clause: _Clause, name: str, value: Column) -> Column:
    type_name = assignment.spark_type(name).simpleString().upper()
    return F.concat(
        F.lit(
            f"table '{assignment.info.path}': {clause.method} gives the key column '{name}' the"
            " value "
        ),
        value.cast("string"),
        F.lit(
            f", which {type_name} cannot hold without loss, and nothing was written; convert it, as"
            f" in cast({name} AS {type_name}), or leave such rows out of the source"
        ),
    )


def _inserts_matched_key(
    merge: Merge, clause: _Clause, equalities: Mapping[str, str] | None, key: Sequence[str]
) -> bool:
    """Whether a clause can only insert the key that had no match."""
    if clause.kind != INSERTED:
        return True
    if equalities is None or set(equalities) != set(key):
        return False
    if clause.values is None:
        return True
    values = {str(name).strip("`").lower(): value for name, value in clause.values.items()}
    return all(
        isinstance(values.get(name.lower()), str)
        and values[name.lower()].replace("`", "").strip().lower()
        == f"{merge.source_alias}.{equalities[name]}".lower()
        for name in key
    )


def _looked_up(
    merge: Merge,
    assignment: Assignment,
    connection: ConnectionOptions,
    equalities: dict[str, str] | None,
) -> DataFrame | None:
    """Return the pairs by lookups of the source's keys; None if the table has to be read."""
    sides = {clause.side for clause in merge.clauses}
    key = assignment.info.descriptor.primary_key
    is_by_key = equalities is not None and set(equalities) == set(key)
    if equalities is None or not is_by_key or _Side.NOT_MATCHED_BY_SOURCE in sides:
        return None
    return matched_by_key(
        merge.source,
        assignment,
        connection,
        equalities=equalities,
        source_alias=merge.source_alias,
        target_alias=merge.target_alias,
        keeps_unmatched=_Side.NOT_MATCHED in sides,
        needs_columns=_Side.MATCHED in sides,
    )


def _equalities(merge: Merge, key: Sequence[str], table: str) -> dict[str, str] | None:
    """Return target column -> source column if rows match by equal columns alone."""
    on = merge.on
    if on is None:
        return {name: name for name in key}
    if isinstance(on, Column):
        return None
    if isinstance(on, str):
        equalities = key_equalities(
            on, target_alias=merge.target_alias, source_alias=merge.source_alias
        )
        return equalities if equalities is not None and set(equalities) == set(key) else None
    columns = dict(on) if isinstance(on, Mapping) else {name: name for name in on}
    if not columns:
        raise InvalidRequestError(f"table '{table}': 'on' of a merge names no column")
    return columns


def _joined(merge: Merge, target: DataFrame, on: Column) -> DataFrame:
    """Return the pairs that some clause may change, by a join with the whole table."""
    source = merge.source.withColumn(IN_SOURCE, F.lit(True)).alias(merge.source_alias)
    target_side = target.withColumn(IN_TARGET, F.lit(True)).alias(merge.target_alias)
    sides = {clause.side for clause in merge.clauses}
    keeps_source, keeps_target = (
        _Side.NOT_MATCHED in sides,
        _Side.NOT_MATCHED_BY_SOURCE in sides,
    )
    how = {
        (False, False): "inner",
        (True, False): "left",
        (False, True): "right",
        (True, True): "full",
    }[keeps_source, keeps_target]
    return source.join(target_side, on, how)


def _all_equal(
    merge: Merge, target: DataFrame, equalities: Mapping[str, str], assignment: Assignment
) -> Column:
    """Return the condition that the columns are equal; key columns are compared as in lookups."""
    is_by_key = set(equalities) == set(assignment.info.descriptor.primary_key)
    sides = []
    for target_name, source_name in equalities.items():
        column = column_of(target.schema, target_name)
        source_column = column_of(merge.source.schema, source_name)
        if column is None or source_column is None:
            side, schema = ("source", merge.source) if column else ("table", target)
            raise UnknownColumnError(
                f"a merge matches rows by column '{source_name if column else target_name}', which"
                f" the {side} lacks (columns: {', '.join(schema.columns)})"
            )
        source_value = named(merge.source_alias, source_column)
        if is_by_key:
            exact = assignment.key(
                column, source_value, merge.source.schema[source_column].dataType
            )
            source_value = source_value if exact is None else exact
        sides.append(named(merge.target_alias, column) == source_value)
    return all_of(sides)


def _values(
    merge: Merge,
    clause: _Clause,
    schema: StructType,
    info: TableInfo,
    equalities: Mapping[str, str] | None,
) -> dict[str, Column]:
    """Return the new value of each column of the table by a clause."""
    key, table = info.descriptor.primary_key, str(info.path)
    names = [field.name for field in schema]
    old_values = {name: named(merge.target_alias, name) for name in names}
    if clause.kind == DELETED:
        return {name: old_values[name] if name in key else F.lit(None) for name in names}
    new_values = _clause_values(merge, clause, names, info, equalities)
    if clause.kind == INSERTED:
        return {name: new_values.get(name, F.lit(None)) for name in names}
    changed = [name for name in new_values if name in key]
    if changed:
        raise UnsupportedError(
            f"table '{table}': {clause.method} sets column '{changed[0]}' of the primary key, which"
            " a row keeps for life; delete the row and insert one with the new key"
        )
    return old_values | new_values


def _clause_values(
    merge: Merge,
    clause: _Clause,
    names: Sequence[str],
    info: TableInfo,
    equalities: Mapping[str, str] | None,
) -> dict[str, Column]:
    """Return the values that a clause names, or the source's values of all columns."""
    key, table = info.descriptor.primary_key, str(info.path)
    if clause.values is not None:
        return assignments(clause.values, columns=names, table=table, operation=clause.method)
    renamed = equalities or {}
    values = {}
    for name in names:
        if clause.kind == UPDATED and name in key:
            continue
        source_column = column_of(merge.source.schema, renamed.get(name, name))
        if source_column is None:
            raise UnknownColumnError(
                f"table '{table}': {clause.method}_all needs a column '{name}' in the source (it"
                f" has: {', '.join(merge.source.columns)}); name the values, as in {clause.method}("
                f'{{"{name}": ...}})'
            )
        values[name] = named(merge.source_alias, source_column)
    return values


def _checked(rows: DataFrame, key: Sequence[str], table: str) -> DataFrame:
    """Add the problem of a row: a key changed twice, or an insert of an existing key."""
    keys = [F.col(quoted(name)) for name in key]
    shown = F.concat_ws(
        ", ",
        *(F.concat(F.lit(f"{n} = "), k.cast("string")) for n, k in zip(key, keys, strict=True)),
    )
    is_twice = F.count(F.lit(1)).over(Window.partitionBy(*keys)) > 1
    cases = [
        (F.col(PROBLEM_COLUMN).isNotNull(), F.col(PROBLEM_COLUMN)),
        (
            is_twice,
            F.concat(
                F.lit(f"table '{table}': several rows of the source would change the row with "),
                shown,
                F.lit("; make the source have one row a key, or narrow the conditions"),
            ),
        ),
    ]
    if _EXISTS in rows.columns:
        is_existing = F.col(_EXISTS).isNotNull() & (F.col(CHANGE_TYPE_COLUMN) == INSERTED)
        message = F.concat(
            F.lit(f"table '{table}': a row to insert has the key of a row that is there: "),
            shown,
            F.lit("; match rows by the primary key, and insert with the key that they match by"),
        )
        cases.append((is_existing, message))
    names = [name for name in rows.columns if name not in (_EXISTS, PROBLEM_COLUMN)]
    columns = [F.col(quoted(name)) for name in names]
    return rows.select(*columns, first_of(cases, F.lit(None)).alias(PROBLEM_COLUMN))
