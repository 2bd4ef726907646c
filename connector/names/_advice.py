"""The advice for a statement that Spark refuses for a table of a Python source.

Spark's own sentence names neither the reason nor an alternative. If the statement mentions an
attached name or the format, our sentence is raised from Spark's error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]  # it has no types
from pyspark.errors import PySparkException

from streamhouse.core.errors import UnsupportedError
from streamhouse.reading.options.options import FORMAT

__all__ = ["advising"]

_SOME_ROWS: Final = (
    "Spark lets no Python source change some of a table's rows in this way: MERGE INTO, UPDATE,"
    " DELETE FROM and TRUNCATE TABLE work as texts of their own, given to spark.sql with the"
    " attached name, and INSERT OVERWRITE replaces all rows"
)
_LOST_ERROR: Final = "SqlScriptingExecutionScope.findHandler"
_NOTHING: Final = (
    "a Streamhouse table needs no such statement: statistics, partitions and files are the"
    " service's own, and load('database.table$files') lists the files"
)
_ADVICE: Final = {
    "UNSUPPORTED_FEATURE.TIME_TRAVEL": (
        "Spark has AS OF for no Python source: write FROM name WITH (asOfTimestamp = '2026-11-21"
        " 10:00:00'), or WITH (asOfSnapshot = '...')"
    ),
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
        advice = _ADVICE.get(error.getCondition() or "")
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
