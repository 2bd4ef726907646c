"""The advice for a statement that Spark refuses for a table of a Python source.

Spark's own sentence names neither the reason nor an alternative. If the statement mentions an
attached name or the format, our sentence is raised from Spark's error.

Calls of a writer without a meaning for a Streamhouse table are refused at the end of the write:
Spark asks a Python source about none of these calls. A batch would fail with a sentence that names
nothing of ours, and a stream would go on without the call's effect.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]  # it has no types
from pyspark.errors import PySparkException

from streamhouse.connector.names._table_statement import name_parts
from streamhouse.core.errors import UnsupportedError
from streamhouse.reading.options.options import FORMAT

__all__ = ["LAYOUT_CALLS", "advising", "check_layout", "check_mode", "missing_table"]

_SOME_ROWS: Final = (
    "Spark lets no Python source change some of a table's rows in this way: MERGE INTO, UPDATE,"
    " DELETE FROM and TRUNCATE TABLE work as texts of their own, given to spark.sql with the"
    " attached name, and INSERT OVERWRITE replaces all rows"
)
_NO_TABLE: Final = "TABLE_OR_VIEW_NOT_FOUND"
_LOST_ERROR: Final = "SqlScriptingExecutionScope.findHandler"
_UNKNOWN_CLAUSE: Final = re.compile(
    r"at or near 'FROM'.*\bCHANGES\s+FROM\s+(VERSION|TIMESTAMP)\b", re.IGNORECASE | re.DOTALL
)
_CHANGES: Final = (
    "CHANGES works for an attached name, not for a view, with bounds that are numbers or texts, in"
    " a statement for spark.sql; else use streamhouse.changes(spark, 'database.table',"
    " startingVersion=...), or load('database.table$changes')"
)
_NOTHING: Final = (
    "a Streamhouse table needs no such statement: statistics, partitions and files are the"
    " service's own, and load('database.table$files') lists the files"
)
_ADVICE: Final = {
    "UNSUPPORTED_FEATURE.TIME_TRAVEL": (
        "Spark has AS OF for no Python source: write FROM name WITH (asOfTimestamp = '2026-11-21"
        " 10:00:00'), or WITH (asOfSnapshot = '...')"
    ),
    "UNSUPPORTED_FEATURE.CHANGE_DATA_CAPTURE": _CHANGES,
    "UNSUPPORTED_FEATURE.CHANGE_DATA_CAPTURE_ON_RELATION": _CHANGES,
    "UNSUPPORTED_FEATURE.TABLE_OPERATION": _SOME_ROWS,
    "_LEGACY_ERROR_TEMP_1121": _SOME_ROWS,
    "NON_PARTITION_COLUMN": _SOME_ROWS,
    "UNSUPPORTED_DATASOURCE_FOR_DIRECT_QUERY": (
        f"Spark queries files so, and {FORMAT} is none: use streamhouse.sql(spark, 'SELECT ... FROM"
        " database.table'), or streamhouse.attach(spark, 'database.table') and its name"
    ),
    "NOT_SUPPORTED_COMMAND_FOR_V2_TABLE": _NOTHING,
    "INVALID_PARTITION_OPERATION.PARTITION_MANAGEMENT_IS_UNSUPPORTED": _NOTHING,
}


@contextlib.contextmanager
def advising(statement: str, *, is_about_us: Callable[[str], bool]) -> Iterator[None]:
    """Raise our sentence in place of Spark's refusal of a statement about our format.

    `is_about_us` is asked with the text of the refusal, because a script may hide its statements.
    """
    try:
        yield
    except PySparkException as error:
        if error.getCondition() == _NO_TABLE:
            _note_attach(error)
        advice = _advice_on(error)
        if advice is None or not is_about_us(str(error)):
            raise
        raise UnsupportedError(f"{statement}: {advice}") from error
    except Py4JJavaError as error:
        # A script of Spark fails at an error without a SQLSTATE, as of the refusal of a deletion.
        if _LOST_ERROR not in str(error) or not is_about_us(""):
            raise
        raise UnsupportedError(
            f"{statement}: a statement of the script failed, and Spark lost the error. {_SOME_ROWS}"
        ) from error


def _note_attach(error: PySparkException) -> None:
    """Add our ways to Spark's error about a missing table: the table may be one of the service.

    The service is not asked: the statement may have nothing to do with it.
    """
    name = missing_table(error)
    if len(name) == 2:
        table = ".".join(name)
        error.add_note(
            f"If '{table}' is a table of a Streamhouse service: streamhouse.sql(spark, ...) reads"
            f" it by this name, and streamhouse.attach(spark, '{table}') gives it a name in Spark."
        )


def missing_table(error: PySparkException) -> tuple[str, ...]:
    """Return the name in Spark's error about a missing table; empty if unknown."""
    parameters = error.getMessageParameters() or {}
    return name_parts(str(parameters.get("relationName", "")))


def _advice_on(error: PySparkException) -> str | None:
    condition = error.getCondition() or ""
    if condition == "PARSE_SYNTAX_ERROR" and _UNKNOWN_CLAUSE.search(str(error)):
        # The grammar of earlier versions has no CHANGES.
        return _CHANGES
    return _ADVICE.get(condition)


LAYOUT_CALLS: Final = {
    "partitionBy": "option partitioned.by, as in .option('partitioned.by', 'region, day(at)')",
    "bucketBy": "options bucket.num and bucket.key",
    "clusterBy": "option partitioned.by, or bucket.num and bucket.key",
}
"""The methods of Spark's writers for the layout of a table, and our replacement of each."""
_MODES: Final = ("append", "overwrite")


def check_layout(arguments: Mapping[str, Any]) -> None:
    """Refuse a layout by Spark's methods; `arguments` has the argument of each method."""
    for call, instead in LAYOUT_CALLS.items():
        if arguments.get(call):
            raise UnsupportedError(
                f"{call}: Spark passes this layout to no Python source; use {instead}, in the write"
                " that creates the table"
            )


def check_mode(mode: Any) -> None:
    """Refuse the modes that Spark passes to no Python source."""
    if str(mode).lower() not in _MODES:
        raise UnsupportedError(
            f"{f'mode {mode!r}' if mode else 'a write without a mode'}: a Streamhouse table is"
            " written by .mode('append'), which creates a missing table, or"
            " .mode('overwrite'), which replaces all rows"
        )
