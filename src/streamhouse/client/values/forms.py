"""Rows in any form that the client takes: Arrow, what lends its columns to Arrow, dicts.

A stream (a `pa.RecordBatchReader`, a DuckDB relation) stays one, so that it is written in bounded
memory. What is no rows is refused with what it is and what to give instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import pyarrow as pa

from streamhouse.core.errors import InvalidRequestError

__all__ = ["Arrow", "PythonRows", "Rows", "Taken", "batches_of", "is_arrow", "taken"]


class _LendsStream(Protocol):
    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


class _LendsArray(Protocol):
    def __arrow_c_array__(self, requested_schema: object | None = None) -> object: ...


class _Interchanges(Protocol):
    def __dataframe__(self, nan_as_null: bool = False, allow_copy: bool = True) -> object: ...


Arrow: TypeAlias = pa.Table | pa.RecordBatch
Rows: TypeAlias = (
    pa.Table
    | pa.RecordBatch
    | pa.RecordBatchReader
    | _LendsStream
    | _LendsArray
    | _Interchanges
    | Mapping[str, Any]
    | Sequence[Mapping[str, Any]]
)
"""What `append` and others take."""

_TAKEN: Final = (
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
"""What to do about what has an attribute; the first one decides."""


@dataclass(frozen=True, slots=True)
class PythonRows:
    """Rows as dicts: only a table says which columns they make."""

    rows: Sequence[Mapping[str, Any]]


Taken: TypeAlias = pa.Table | pa.RecordBatch | pa.RecordBatchReader | PythonRows


def is_arrow(data: object) -> bool:
    """Whether rows are in the form in which they are sent."""
    return isinstance(data, _ARROW)


def taken(data: object, *, call: str) -> Taken:
    """Return rows as Arrow's, as a stream or as dicts; `call` is whose argument they are.

    Raises `InvalidRequestError` for what is no rows.
    """
    if isinstance(data, (pa.RecordBatch, pa.Table, pa.RecordBatchReader)):
        return data
    if type(data) is not list and isinstance(data, Mapping):
        return PythonRows((data,))
    if isinstance(data, list | tuple) and not hasattr(data, "_fields"):
        return _listed(data, call=call)
    try:
        found = _lent(data)
    except (pa.ArrowException, TypeError, ValueError, NotImplementedError) as error:
        reason = "; ".join(str(part) for part in error.args)
        raise InvalidRequestError(
            f"{call}: Arrow cannot read the {_name(data)}: {reason}"
        ) from error
    if found is None:
        raise InvalidRequestError(
            f"{call} takes rows as {_TAKEN}, not {_described(data)}{_instead_of(data)}"
        )
    return found


def batches_of(reader: pa.RecordBatchReader, *, call: str) -> Iterator[pa.RecordBatch]:
    """Yield what a stream has; what Arrow says of one that breaks off becomes a sentence."""
    row_count = 0
    try:
        for batch in reader:
            row_count += batch.num_rows
            yield batch
    except (pa.ArrowException, OSError) as error:
        raise InvalidRequestError(
            f"{call}: the stream broke off after {row_count} rows: {error}"
        ) from error


def _listed(data: Sequence[Any], *, call: str) -> Taken:
    if data and isinstance(data[0], pa.RecordBatch):
        try:
            return pa.Table.from_batches(data)
        except (pa.ArrowInvalid, TypeError) as error:
            raise InvalidRequestError(f"{call}: the record batches differ: {error}") from error
    # Asking an abstract class takes a multiple of this.
    if set(map(type, data)) <= {dict}:
        return PythonRows(data)
    for row, item in enumerate(data):
        if not isinstance(item, Mapping):
            raise InvalidRequestError(
                f"{call}: a list of rows has a dict for each, but row {row} is"
                f" {_described(item)}{_instead_of(item)}"
            )
    return PythonRows(data)


def _lent(data: Any) -> Taken | None:
    """Return what an object lends to Arrow, None if it lends nothing."""
    library = type(data).__module__.partition(".")[0]
    if library == "pandas" and type(data).__name__ == "DataFrame":
        # The index names rows; it is no column. NaN is how pandas says that there is no value.
        frame = pa.Table.from_pandas(data, preserve_index=False)
        return frame.replace_schema_metadata(None)
    if hasattr(data, "__arrow_c_stream__"):
        reader = pa.RecordBatchReader.from_stream(data)
        # What is in memory is checked as a whole before any of it is written.
        return reader.read_all() if library in ("polars", "pyarrow") else reader
    if hasattr(data, "__arrow_c_array__"):
        return pa.record_batch(data)
    if hasattr(data, "__dataframe__"):
        from pyarrow.interchange import from_dataframe

        return from_dataframe(data)
    return None


def _name(data: object) -> str:
    kind = type(data)
    library = kind.__module__.partition(".")[0]
    return kind.__name__ if library == "builtins" else f"{library}.{kind.__name__}"


def _described(data: object) -> str:
    return "None" if data is None else f"a {_name(data)}"


def _instead_of(data: object) -> str:
    """Return what to do about a typical mistake, or nothing."""
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
