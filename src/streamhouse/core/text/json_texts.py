"""JSON objects, one a text, as columns.

Arrow reads whole runs of texts with the types that are wanted. A run that it does not read is
halved until the texts that it does not know are among few: only these are read by Python. So
`"NaN"`, a map or a text for a number costs some microseconds, and what is wrong has the number of
its text.

Arrow would find several objects in one text, and one in several. So a run is only its to read if
every text begins and ends as an object, and it finds as many objects as there are texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from streamhouse.core.errors import RequestTooLargeError, SchemaMismatchError
from streamhouse.core.model.rejected.division import Arranged, arranged
from streamhouse.core.text._json_marks import has_far_exponents, is_strict_json
from streamhouse.core.text.json_reading import (
    JSON_DEPTH_MAX,
    is_of,
    json_object,
    plain_values,
)
from streamhouse.core.text.text_rows import as_values, nested_bytes, width_of

__all__ = [
    "JsonRun",
    "JsonTexts",
    "RowReader",
    "arrow_rows",
    "check_finite",
    "read_type",
    "runs_of",
]

_RUN_BYTES: Final = 1 << 20
_RUN_WIDTH: Final = 16 << 20
"""So many bytes may rows of a run take that have no values."""
# Halving further takes longer than reading so few texts by Python.
_RUN_TEXTS_MIN: Final = 64
ODD_TEXTS_MAX: Final = 65_536
# Arrow's reader hands them to threads of its own, which takes longer than reading them here.
_FEW_TEXTS: Final = 16
# A text with more blanks before or after it is read by Python.
_BLANKS_MAX: Final = 64
_IS_BLANK: Final = np.isin(np.arange(256), list(b" \t\r\n"))

_Run = TypeVar("_Run")


class JsonTexts:
    """Texts in one body, with whitespace between two of them.

    Args:
        body: the bytes of all.
        starts, ends: where each text is; ends are exclusive.
    """

    def __init__(
        self, body: bytes | pa.Buffer, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
    ) -> None:
        self._body = pa.py_buffer(body)
        data = np.frombuffer(self._body, np.uint8) if len(body) else np.zeros(1, np.uint8)
        self._data = data
        self.starts, self.ends = _trimmed(data, starts, ends)
        # A place before the first byte, or behind the last one, is that of the nearest byte.
        self._is_object = data.take(self.starts, mode="clip") == ord("{")
        self._is_object &= data.take(self.ends - 1, mode="clip") == ord("}")
        self._is_object &= self.ends - self.starts > 1

    def __len__(self) -> int:
        return len(self.starts)

    def text(self, at: int) -> bytes:
        """Return one text."""
        start, end = int(self.starts[at]), int(self.ends[at])
        found: bytes = self._body.slice(start, end - start).to_pybytes()
        return found

    def run(self, first: int, end: int) -> pa.Buffer | None:
        """Return texts as one; None if one of them is no object, as seen from its ends."""
        if not self._is_object[first:end].all():
            return None
        start = int(self.starts[first])
        return self._body.slice(start, int(self.ends[end - 1]) - start)

    def braces(self, first: int, end: int) -> int:
        """Return how many objects may be in texts."""
        part = self._data[int(self.starts[first]) : int(self.ends[end - 1])]
        return int(np.count_nonzero(part == ord("{")))

    def has_far_exponents(self, first: int, end: int) -> bool:
        """Whether a number of a run may be one that Arrow reads wrongly as a decimal."""
        return has_far_exponents(self._data[int(self.starts[first]) : int(self.ends[end - 1])])

    def is_strict(self, first: int, end: int) -> bool:
        """Whether a run that Arrow has read is JSON, also in what was left out."""
        start = int(self.starts[first])
        part = self._data[start : int(self.ends[end - 1])]
        return is_strict_json(part, self.starts[first:end] - start, depth_max=JSON_DEPTH_MAX)

    def begin_with(self, prefix: bytes, first: int, end: int) -> bool:
        """Whether all texts of a run begin with the same bytes."""
        start = int(self.starts[first])
        run = self._body.slice(start, int(self.ends[end - 1]) - start).to_pybytes()
        places = zip(self.starts[first:end] - start, self.ends[first:end] - start, strict=True)
        return all(run.startswith(prefix, int(at), int(stop)) for at, stop in places)

    def until(self, first: int, bytes_max: int) -> int:
        """Return how far texts from `first` on have so many bytes; one text at least."""
        end = int(np.searchsorted(self.ends, self.starts[first] + bytes_max, side="right"))
        return max(end, first + 1)


def _trimmed(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return where texts are without the blanks around them, unless these are many."""
    for _ in range(_BLANKS_MAX):
        blank = _IS_BLANK.take(data.take(ends - 1, mode="clip"))
        if not np.count_nonzero(blank) or not (blank := blank & (ends > starts)).any():
            break
        ends = ends - blank
    for _ in range(_BLANKS_MAX):
        blank = _IS_BLANK.take(data.take(starts, mode="clip"))
        if not np.count_nonzero(blank) or not (blank := blank & (ends > starts)).any():
            break
        starts = starts + blank
    return starts, ends


def runs_of(
    texts: JsonTexts,
    *,
    width: int,
    read: Callable[[int, int], _Run | None],
    read_few: Callable[[int, int], _Run],
    what: str,
) -> Iterator[tuple[int, int, _Run]]:
    """Yield every run of texts with what was read of it, in their order.

    Args:
        width: at most how many bytes a row without values takes.
        read: reads texts by whole columns; None if they are not all plain.
        read_few: reads any, one by one.
        what: what errors begin with.

    Raises `RequestTooLargeError` if more than `ODD_TEXTS_MAX` texts are read one by one.
    """
    step = max(_RUN_WIDTH // width, 1)
    odd_count = 0
    first = 0
    if len(texts) <= _FEW_TEXTS:
        first = len(texts)
        if first:
            yield 0, first, read_few(0, first)
    while first < len(texts):
        end = min(texts.until(first, _RUN_BYTES), first + step)
        waiting = [(first, end)]
        first = end
        while waiting:
            start, stop = waiting.pop()
            run = read(start, stop)
            if run is None and stop - start > _RUN_TEXTS_MIN:
                half = (start + stop) // 2
                waiting += [(half, stop), (start, half)]
                continue
            if run is None:
                odd_count += stop - start
                if odd_count > ODD_TEXTS_MAX:
                    raise RequestTooLargeError(
                        f"{what}: more than {ODD_TEXTS_MAX} rows have values that take long to"
                        " read, as maps do, and texts in place of numbers; send fewer at once"
                    )
                run = read_few(start, stop)
            yield start, stop, run


@dataclass(frozen=True, slots=True)
class JsonRun:
    """The rows of a run of texts, one a text.

    `bad` has those that are none, by their positions, with column and reason: they are null in
    `rows`. `given` returns what an object has if they were read one by one.
    """

    rows: pa.RecordBatch
    bad: Mapping[int, tuple[str | None, str]]
    given: Callable[[int], Mapping[str, Any]] | None = None


class _Unreadable(Protocol):
    def __call__(self, at: int, reason: str, /) -> str:
        """Return why text number `at` is no row, or raise: `reason` is why it is no object."""


class RowReader:
    """Reads texts as rows of the columns `types`; a column that a text does not name is null.

    Args:
        check: is told of rows and bytes before they are read, and raises if they are too many.
        unreadable: says what becomes of a text that is no JSON object.
        what: what errors begin with.
        whose: whose columns they are, as errors say it.
        defaults: texts in place of nulls, by their columns.
    """

    def __init__(
        self,
        texts: JsonTexts,
        types: Mapping[str, pa.DataType],
        *,
        check: Callable[[int, int], None],
        unreadable: _Unreadable,
        what: str,
        whose: str = "the table",
        defaults: Mapping[str, str] | None = None,
    ) -> None:
        self._texts = texts
        self._types = types
        self._check = check
        self._unreadable = unreadable
        self._what = what
        self._whose = whose
        self._defaults = defaults or {}
        self._width = width_of(types.values())
        self._read_as: pa.Schema | None = None
        read_as = {name: read_type(t) for name, t in types.items()}
        if None not in read_as.values():
            self._read_as = pa.schema(list(read_as.items()))

    def runs(self) -> Iterator[tuple[int, int, JsonRun]]:
        """Yield every run of texts with its rows."""
        yield from runs_of(
            self._texts,
            width=self._width,
            read=self._read,
            read_few=self._read_few,
            what=self._what,
        )

    def _read(self, first: int, end: int) -> JsonRun | None:
        if self._read_as is None:
            return None
        self._check(end - first, (end - first) * self._width)
        rows = arrow_rows(self._texts, first, end, self._read_as, width=self._width)
        if rows is None:
            return None
        try:
            return JsonRun(self._with_values(rows), {})
        except (pa.ArrowException, SchemaMismatchError):
            return None

    def _with_values(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows as they are read with the wanted types."""
        arrays = []
        for (name, t), array in zip(self._types.items(), rows.columns, strict=True):
            if array.type != t:
                array = as_values(array, t)
            elif name in self._defaults:
                array = array.fill_null(self._defaults[name])
            check_finite(array)
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(list(self._types.items())))

    def _read_few(self, first: int, end: int) -> JsonRun:
        self._check(end - first, 0)
        given: list[Mapping[str, Any]] = []
        unread: dict[int, tuple[str | None, str]] = {}
        for at in range(first, end):
            try:
                row = json_object(self._texts.text(at))
            except ValueError as error:
                unread[at - first] = (None, self._unreadable(at, str(error)))
                row = {}
            given.append(row)
        self._check(end - first, sum(nested_bytes(row, self._types) for row in given))
        found: Arranged = arranged(self._types, given, whose=self._whose, defaults=self._defaults)
        return JsonRun(
            found.rows, {**found.bad, **unread}, lambda at: plain_values(given[at], self._types)
        )


def arrow_rows(
    texts: JsonTexts,
    first: int,
    end: int,
    schema: pa.Schema,
    *,
    width: int,
    unexpected: str = "error",
) -> pa.RecordBatch | None:
    """Return texts as rows that Arrow reads; None if some are not plain, or none at all."""
    text = texts.run(first, end)
    # Several objects may be in one text: that many rows would be made of it.
    if text is None or texts.braces(first, end) * width > 4 * _RUN_WIDTH:
        return None
    if any(is_of(t, pa.types.is_decimal) for t in schema.types) and texts.has_far_exponents(
        first, end
    ):
        return None
    try:
        # `read_json` takes twice as long for few texts.
        reader = pyarrow.json.open_json(
            pa.BufferReader(text),
            read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(text) + 1),
            parse_options=pyarrow.json.ParseOptions(
                explicit_schema=schema,
                newlines_in_values=False,
                unexpected_field_behavior=unexpected,
            ),
        )
        read = reader.read_all()
        if read.num_rows != end - first:
            return None
        rows = read.combine_chunks().to_batches()[0]
        rows.validate(full=True)
    except (pa.ArrowException, UnicodeDecodeError):
        return None
    if unexpected != "error" and not texts.is_strict(first, end):
        return None
    return rows.select(schema.names)


def read_type(t: pa.DataType) -> pa.DataType | None:
    """Return the type that Arrow reads a column as; None if it does not."""
    if _is_text(t):
        return pa.string()
    if pa.types.is_list(t):
        # Arrow reads dates as numbers, and bytes as letters: below, too.
        return t if _is_plain(t.value_type) else None
    if pa.types.is_struct(t):
        return t if all(_is_plain(t.field(i).type) for i in range(t.num_fields)) else None
    return t if _is_plain(t) else None


def _is_plain(t: pa.DataType) -> bool:
    return bool(
        pa.types.is_boolean(t)
        or pa.types.is_integer(t)
        or pa.types.is_float64(t)
        or pa.types.is_float32(t)
        or pa.types.is_decimal(t)
        or pa.types.is_string(t)
    )


def _is_text(t: pa.DataType) -> bool:
    return bool(pa.types.is_date(t) or pa.types.is_timestamp(t) or pa.types.is_binary(t))


def check_finite(array: pa.Array) -> None:
    """Raise `SchemaMismatchError` for numbers that JSON does not have.

    They were too large, or are seen one by one.
    """
    t = array.type
    if pa.types.is_list(t):
        check_finite(array.flatten())
    elif pa.types.is_struct(t):
        for part in array.flatten():
            check_finite(part)
    elif pa.types.is_floating(t) and pc.any(pc.invert(pc.is_finite(array))).as_py():
        raise SchemaMismatchError("a number is too large")
