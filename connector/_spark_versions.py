"""What differs between the versions of PySpark, 4.0 and later: no other module asks which one runs.

A name that some version lacks, or has in another form, is imported from here. What a version has is
looked up, in the order of the versions:

- 4.0 has no function on Arrow's columns (`arrow_udf`), and asks no source for filters: it plans a
  relation again in every statement by itself
- 4.1 asks for filters, and plans a relation once without them
- 4.2 tells a stream's reader the start and the size of a micro-batch. Before 4.2 the reader keeps
  the start, and Spark runs `availableNow` as a single micro-batch
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyspark
from pyspark.sql import DataFrame, datasource
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas import types as arrow_types
from pyspark.sql.types import StructType

from streamhouse.core.errors import UnsupportedError
from streamhouse.reading.follow.stream_lag import NEWEST_MEMBER

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )

__all__ = [
    "ASKS_FOR_FILTERS",
    "GIVES_READ_LIMITS",
    "SHOWS_OPTIONS_OF_USES",
    "DataSourceStreamArrowWriter",
    "OwnStepReader",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
    "arrow_function",
    "from_arrow_schema",
    "has_arrow_functions",
    "to_arrow_schema",
    "warn_of_unknown_version",
]

_TESTED: Final = ("4.0", "4.1", "4.2", "4.3")

ASKS_FOR_FILTERS: Final = hasattr(DataSourceReader, "pushFilters")
"""Whether Spark plans a relation again for a filter (4.1), and else keeps its first plan."""
SHOWS_OPTIONS_OF_USES: Final = hasattr(DataFrame, "zip")
"""Whether a plan keeps the options of each use of a name, and not those of the first use alone.

Python cannot see this change of Spark 4.3's analyzer: `zip` came with it.
"""
GIVES_READ_LIMITS: Final = find_spec("pyspark.sql.streaming.datasource") is not None
"""Whether Spark tells a stream's reader where a micro-batch starts, and its size (4.2)."""

_has_timezone: Final = "timezone" in inspect.signature(arrow_types.to_arrow_schema).parameters

if TYPE_CHECKING:
    pass
elif GIVES_READ_LIMITS:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
else:

    class ReadLimit:
        """The size of a micro-batch."""

    @dataclass(frozen=True)
    class ReadAllAvailable(ReadLimit):
        """A micro-batch of all rows."""

    @dataclass(frozen=True)
    class ReadMaxRows(ReadLimit):
        """A micro-batch of at most so many rows."""

        max_rows: int

    class SupportsTriggerAvailableNow:
        """A reader that ends at the newest row of the query's start."""


if TYPE_CHECKING:
    pass
elif hasattr(datasource, "DataSourceStreamArrowWriter"):
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
else:
    # 4.0 gives Arrow's batches to every writer of this class, of a stream too.
    class DataSourceStreamArrowWriter(
        datasource.DataSourceStreamWriter, datasource.DataSourceArrowWriter
    ):
        """Writes Arrow's batches of a stream."""


def to_arrow_schema(schema: StructType) -> pa.Schema:
    """Return the columns of a schema of Spark's in Arrow's types; an instant has the zone UTC."""
    convert: Any = arrow_types.to_arrow_schema
    return convert(schema, timezone="UTC") if _has_timezone else convert(schema)


def from_arrow_schema(schema: pa.Schema) -> StructType:
    """Return columns in Spark's types; a time without a zone is a `timestamp_ntz`."""
    return arrow_types.from_arrow_schema(schema, prefer_timestamp_ntz=True)


def has_arrow_functions() -> bool:
    """Whether Spark has functions on Arrow's columns (4.1). Loads pandas."""
    from pyspark.sql.pandas import functions  # noqa: PLC0415 - executors need no pandas

    return hasattr(functions, "arrow_udf")


def arrow_function(function: Any, returned: Any, *, purpose: str) -> Any:
    """Return Spark's function of a Python function on Arrow's columns.

    Raises `UnsupportedError`, which names the purpose, where Spark has no such functions.
    """
    if not has_arrow_functions():
        raise UnsupportedError(
            f"{purpose} needs PySpark 4.1 or later, and this is PySpark {pyspark.__version__}"
        )
    from pyspark.sql.pandas.functions import arrow_udf  # noqa: PLC0415 - executors need no pandas

    make_function: Any = arrow_udf
    return make_function(function, returned)


@functools.cache
def warn_of_unknown_version() -> None:
    """Warn once a process of a PySpark that Streamhouse was not tested with."""
    if ".".join(pyspark.__version__.split(".")[:2]) not in _TESTED:
        warnings.warn(
            f"Streamhouse was tested with PySpark {_TESTED[0]} to {_TESTED[-1]}, and this is"
            f" PySpark {pyspark.__version__}: what the version has is looked up, and what differs"
            " otherwise is unknown",
            stacklevel=3,
        )


class OwnStepReader(DataSourceStreamReader):
    """Calls a reader of PySpark 4.2's kind where Spark does not say where a micro-batch starts.

    The next one starts at the last end that was returned. After a restart Spark first plans the
    empty range at its newest offset. A micro-batch is the range that Spark says, in any case.
    """

    def __init__(self, reader: Any, *, in_steps: bool, is_ending: bool) -> None:
        """Read in the reader's own steps, or all rows in each micro-batch.

        An ending reader stays at the newest row of its first micro-batch.
        """
        self._reader = reader
        self._in_steps = in_steps
        self._is_unprepared = is_ending
        self._end: dict[str, Any] | None = None

    def initialOffset(self) -> dict[str, Any]:
        """Return the start of a stream without a checkpoint."""
        start: dict[str, Any] = self._reader.initialOffset()
        return start

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the end of the next micro-batch."""
        start: dict[str, Any] = self._reader.initialOffset() if self._end is None else self._end
        if self._is_unprepared:
            self._reader.prepareForTriggerAvailableNow()
            self._is_unprepared = False
        limit = self._reader.getDefaultReadLimit() if self._in_steps else ReadAllAvailable()
        end = self._reader.latestOffset(start, limit)
        # An unchanged offset stays the same text: Spark takes another one for new rows.
        if end != _without_newest(start):
            newest = getattr(self._reader, "reportLatestOffset", lambda: None)()
            start = end if newest is None else end | {NEWEST_MEMBER: newest}
        self._end = start
        return start

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Plan the rows from `start` to `end`."""
        self._end = end
        partitions: Sequence[InputPartition] = self._reader.partitions(start, end)
        return partitions

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the rows of a partition."""
        yield from self._reader.read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: the next micro-batch begins at this end."""


def _without_newest(offset: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in offset.items() if name != NEWEST_MEMBER}
