"""Rows in any form of the client's callers: Arrow data, objects with an Arrow export, dicts.

A stream (a `pa.RecordBatchReader`, a DuckDB relation) stays a stream, and is written in bounded
memory. All remaining objects are refused, with type and advice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import pyarrow as pa

from streamhouse.core.errors import InvalidRequestError

__all__ = [
    "Arrow",
    "NormalizedRows",
    "PythonRows",
    "Rows",
    "batches_of",
    "is_arrow",
    "normalized_rows",
]


class _StreamExporter(Protocol):
    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


class _ArrayExporter(Protocol):
    def __arrow_c_array__(self, requested_schema: object | None = None) -> object: ...


class _FrameExporter(Protocol):
    def __dataframe__(self, nan_as_null: bool = False, allow_copy: bool = True) -> object: ...


Arrow: TypeAlias = pa.Table | pa.RecordBatch
Rows: TypeAlias = (
    pa.Table
    | pa.RecordBatch
    | pa.RecordBatchReader
    | _StreamExporter
    | _ArrayExporter
    | _FrameExporter
    | Mapping[str, Any]
    | Sequence[Mapping[str, Any]]
)
"""The forms of rows that `append` and the other writes take."""

_ROW_FORMS: Final = (
    "an Arrow table, record batch or reader, a pandas or polars frame, a DuckDB relation, a dict"
    " or a list of dicts"
)
_ARROW: Final = (pa.RecordBatch, pa.Table)
_ADVICE: Final = {
    "collect": "call its collect() first",
    "to_table": "give its to_table(), or scanner().to_reader()",
    "__await__": "await it first",
    "to_frame": "call its to_frame() first",
    "_asdict": "call its _asdict()",
    "__dataclass_fields__": "use dataclasses.asdict",
    "model_dump": "call its model_dump()",
}
"""Attribute -> advice for objects with the attribute; the first match counts."""


@dataclass(frozen=True, slots=True)
class PythonRows:
    """Rows as dicts, without column types: only a table gives the columns types."""

    rows: Sequence[Mapping[str, Any]]


NormalizedRows: TypeAlias = pa.Table | pa.RecordBatch | pa.RecordBatchReader | PythonRows


def is_arrow(data: object) -> bool:
    """Return whether rows are in the form in which they are sent."""
    return isinstance(data, _ARROW)


def normalized_rows(data: object, *, call: str) -> NormalizedRows:
    """Return rows as Arrow data, as a stream or as dicts; `call` names the caller for messages.

    Raises `InvalidRequestError` for an object that has no rows.
    """
    if isinstance(data, (pa.RecordBatch, pa.Table, pa.RecordBatchReader)):
        return data
    if type(data) is not list and isinstance(data, Mapping):
        return PythonRows((data,))
    if isinstance(data, list | tuple) and not hasattr(data, "_fields"):
        return _rows_of_list(data, call=call)
    try:
        rows = _exported(data)
    except (pa.ArrowException, TypeError, ValueError, NotImplementedError) as error:
        reason = "; ".join(str(part) for part in error.args)
        raise InvalidRequestError(
            f"{call}: Arrow cannot read the {_name(data)}: {reason}"
        ) from error
    if rows is None:
        raise InvalidRequestError(
            f"{call} takes rows as {_ROW_FORMS}, not {_described(data)}{_advice_for(data)}"
        )
    return rows


def batches_of(reader: pa.RecordBatchReader, *, call: str) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a stream; an error of Arrow in the middle becomes a sentence."""
    row_count = 0
    try:
        for batch in reader:
            row_count += batch.num_rows
            yield batch
    except (pa.ArrowException, OSError) as error:
        raise InvalidRequestError(
            f"{call}: the stream broke off after {row_count} rows: {error}"
        ) from error


def _rows_of_list(data: Sequence[Any], *, call: str) -> NormalizedRows:
    if data and isinstance(data[0], pa.RecordBatch):
        try:
            return pa.Table.from_batches(data)
        except (pa.ArrowInvalid, TypeError) as error:
            raise InvalidRequestError(f"{call}: the record batches differ: {error}") from error
    # An isinstance check with an abstract class is several times slower.
    if set(map(type, data)) <= {dict}:
        return PythonRows(data)
    for row, item in enumerate(data):
        if not isinstance(item, Mapping):
            raise InvalidRequestError(
                f"{call}: a list of rows has a dict for each, but row {row} is"
                f" {_described(item)}{_advice_for(item)}"
            )
    return PythonRows(data)


def _exported(data: Any) -> NormalizedRows | None:
    """Return the rows that an object exports to Arrow; None if it has no export."""
    library = type(data).__module__.partition(".")[0]
    if library == "pandas" and type(data).__name__ == "DataFrame":
        # The index names rows and is no column. pandas writes a missing value as NaN.
        frame = pa.Table.from_pandas(data, preserve_index=False)
        return frame.replace_schema_metadata(None)
    if hasattr(data, "__arrow_c_stream__"):
        reader = pa.RecordBatchReader.from_stream(data)
        # Rows in memory are checked as a whole before the first of them is written.
        return reader.read_all() if library in ("polars", "pyarrow") else reader
    if hasattr(data, "__arrow_c_array__"):
        return pa.record_batch(data)
    if hasattr(data, "__dataframe__"):
        from pyarrow.interchange import from_dataframe  # noqa: PLC0415 - few callers have such frames

        return from_dataframe(data)
    return None


def _name(data: object) -> str:
    kind = type(data)
    library = kind.__module__.partition(".")[0]
    return kind.__name__ if library == "builtins" else f"{library}.{kind.__name__}"


def _described(data: object) -> str:
    return "None" if data is None else f"a {_name(data)}"


def _advice_for(data: object) -> str:
    """Return advice for a typical mistake, or nothing."""
    for attribute, advice in _ADVICE.items():
        if hasattr(data, attribute):
            return f"; {advice}"
    if isinstance(data, str | bytes):
        return "; parse it first, as json.loads does"
    if isinstance(data, Iterable) and not isinstance(data, Sequence):
        return "; make it a list of dicts, or a pa.RecordBatchReader"
    if isinstance(data, Sequence):
        return "; give each row as {'column': value}"
    return ""
