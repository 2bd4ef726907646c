"""JSON objects, one per text, as columns.

Arrow reads whole runs of texts with the requested types. A run that Arrow cannot read is halved
until the odd texts are among few; Python reads only these few texts. A `"NaN"`, a map, or a text in
place of a number thus costs some microseconds, and an error names the number of the text.

Arrow would accept several objects in one text, or one object across several texts. Arrow therefore
reads a run only if every text begins and ends like an object, and the result counts only if Arrow
returns one object per text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from streamhouse.core.errors import RequestTooLargeError, SchemaMismatchError
from streamhouse.core.rows.checked_rows import Misfit, Misfits, ReadRows
from streamhouse.core.rows.division import read_rows
from streamhouse.core.text._json_marks import has_far_exponents, is_strict_json
from streamhouse.core.text.json_reading import (
    JSON_DEPTH_MAX,
    is_of,
    json_object,
    plain_values,
)
from streamhouse.core.text.text_rows import as_values, nested_bytes, width_of
from streamhouse.core.types.registry import type_of

__all__ = [
    "JsonTexts",
    "RowReader",
    "arrow_rows",
    "check_finite",
    "joined_runs",
    "runs_of",
    "texts_of",
]

_RUN_BYTES: Final = 1 << 20
_RUN_WIDTH: Final = 16 << 20
"""The most bytes that the rows of a run may take without any values."""
# Halving a run of fewer texts takes longer than reading the texts by Python.
_RUN_TEXTS_MIN: Final = 64
ODD_TEXTS_MAX: Final = 65_536
# Arrow's reader starts threads; for few texts the start takes longer than reading by Python.
_FEW_TEXTS: Final = 16
# Python reads a text with more leading or trailing blanks.
_BLANKS_MAX: Final = 64
# Arrow joins more values in less time.
_FEW_VALUES: Final = 1_000
_IS_BLANK: Final = np.isin(np.arange(256), list(b" \t\r\n"))

_Run = TypeVar("_Run")


class JsonTexts:
    """Texts in one body, separated by whitespace.

    Args:
        body: the bytes of all texts.
        starts, ends: the start and the end of each text; ends are exclusive.
    """

    def __init__(
        self, body: bytes | pa.Buffer, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
    ) -> None:
        self._body = pa.py_buffer(body)
        data = np.frombuffer(self._body, np.uint8) if len(body) else np.zeros(1, np.uint8)
        self._data = data
        self.starts, self.ends = _trimmed(data, starts, ends)
        # A position outside of the body counts as the nearest byte.
        self._is_object = data.take(self.starts, mode="clip") == ord("{")
        self._is_object &= data.take(self.ends - 1, mode="clip") == ord("}")
        self._is_object &= self.ends - self.starts > 1

    def __len__(self) -> int:
        return len(self.starts)

    def text(self, at: int) -> bytes:
        """Return one text."""
        start, end = int(self.starts[at]), int(self.ends[at])
        text: bytes = self._body.slice(start, end - start).to_pybytes()
        return text

    def run(self, first: int, end: int) -> pa.Buffer | None:
        """Return texts as one buffer; None if a text does not begin and end like an object."""
        if not self._is_object[first:end].all():
            return None
        start = int(self.starts[first])
        return self._body.slice(start, int(self.ends[end - 1]) - start)

    def braces(self, first: int, end: int) -> int:
        """Return the number of opening braces in texts: at least the number of objects."""
        part = self._data[int(self.starts[first]) : int(self.ends[end - 1])]
        return int(np.count_nonzero(part == ord("{")))

    def has_far_exponents(self, first: int, end: int) -> bool:
        """Whether a run may have a number which Arrow reads wrongly as a decimal."""
        return has_far_exponents(self._data[int(self.starts[first]) : int(self.ends[end - 1])])

    def is_strict(self, first: int, end: int) -> bool:
        """Whether a run is strict JSON, also in the fields which Arrow skipped."""
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
        """Return the end of the texts from `first` on within `bytes_max`; one text at least."""
        end = int(np.searchsorted(self.ends, self.starts[first] + bytes_max, side="right"))
        return max(end, first + 1)


def texts_of(values: pa.BinaryArray) -> JsonTexts:
    """Return values, without nulls, as texts with a newline in between."""
    count = len(values)
    bounds = np.frombuffer(values.buffers()[1], np.int32, count + 1, 4 * values.offset)
    lengths = np.diff(bounds).astype(np.int64)
    if count <= _FEW_VALUES:
        body: bytes | pa.Buffer = b"\n".join(values.to_pylist())
    else:
        whole = pa.LargeListArray.from_arrays(pa.array([0, count], pa.int64()), values)
        body = pc.binary_join(whole, pa.scalar(b"\n", pa.binary()))[0].as_buffer()
    ends = np.cumsum(lengths + 1) - 1
    return JsonTexts(body, ends - lengths, ends)


def _trimmed(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return starts and ends without the blanks around texts, up to `_BLANKS_MAX` blanks."""
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
    """Yield every run of texts with its result, in order.

    Args:
        width: the most bytes of a row without values.
        read: reads texts by whole columns; None if a text is not plain.
        read_few: reads any texts, one by one.
        what: the beginning of error messages.

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
                        f"{what}: more than {ODD_TEXTS_MAX} rows have values that are slow to"
                        " read, as maps and texts in place of numbers; send fewer rows at once"
                    )
                run = read_few(start, stop)
            yield start, stop, run


def joined_runs(runs: Iterable[tuple[int, int, ReadRows]]) -> ReadRows:
    """Return the rows of all runs, at least one; the original values are not kept."""
    batches: list[pa.RecordBatch] = []
    misfits: Misfits = {}
    for first, _, run in runs:
        batches.append(run.rows)
        misfits |= {first + at: misfit for at, misfit in run.misfits.items()}
    return ReadRows(batches[0] if len(batches) == 1 else pa.concat_batches(batches), misfits)


class RowReader:
    """Reads texts as rows of the columns `types`; a column missing from a text is null.

    Args:
        check: receives the number of rows and bytes before reading, and raises above a limit.
        unreadable: decides about a text that is not a JSON object.
        what: the beginning of error messages.
        owner: the owner of the columns, for error messages.
        defaults: texts in place of nulls, by column.
    """

    def __init__(
        self,
        texts: JsonTexts,
        types: Mapping[str, pa.DataType],
        *,
        check: Callable[[int, int], None],
        unreadable: Callable[[int, str], str],
        what: str,
        owner: str = "the table",
        defaults: Mapping[str, str] | None = None,
    ) -> None:
        self._texts = texts
        self._types = types
        self._check = check
        self._unreadable = unreadable
        self._what = what
        self._owner = owner
        self._defaults = defaults or {}
        self._width = width_of(types.values())
        self._read_as: pa.Schema | None = None
        read_as = {name: type_of(t).arrow_json_type for name, t in types.items()}
        if None not in read_as.values():
            self._read_as = pa.schema(list(read_as.items()))

    def runs(self) -> Iterator[tuple[int, int, ReadRows]]:
        """Yield every run of texts with its rows.

        A text that is not a row is a misfit.
        """
        yield from runs_of(
            self._texts,
            width=self._width,
            read=self._read,
            read_few=self._read_few,
            what=self._what,
        )

    def _read(self, first: int, end: int) -> ReadRows | None:
        if self._read_as is None:
            return None
        self._check(end - first, (end - first) * self._width)
        rows = arrow_rows(self._texts, first, end, self._read_as, width=self._width)
        if rows is None:
            return None
        try:
            return ReadRows(self._with_values(rows), {})
        except (pa.ArrowException, SchemaMismatchError):
            return None

    def _with_values(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows, read as `read_type`, with the requested types."""
        arrays = []
        for (name, t), array in zip(self._types.items(), rows.columns, strict=True):
            if array.type != t:
                array = as_values(array, t)
            elif name in self._defaults:
                array = array.fill_null(self._defaults[name])
            check_finite(array)
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(list(self._types.items())))

    def _read_few(self, first: int, end: int) -> ReadRows:
        self._check(end - first, 0)
        objects: list[Mapping[str, Any]] = []
        unread: Misfits = {}
        for at in range(first, end):
            try:
                row = json_object(self._texts.text(at))
            except ValueError as error:
                unread[at - first] = Misfit(None, self._unreadable(at, str(error)))
                row = {}
            objects.append(row)
        self._check(end - first, sum(nested_bytes(row, self._types) for row in objects))
        read = read_rows(self._types, objects, owner=self._owner, defaults=self._defaults)
        return ReadRows(
            read.rows,
            {**read.misfits, **unread},
            lambda at: plain_values(objects[at], self._types),
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
    """Return texts as rows read by Arrow; None if a text is not plain or not an object."""
    text = texts.run(first, end)
    # A text may have many objects, and Arrow would make a row of each.
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


def check_finite(array: pa.Array) -> None:
    """Raise `SchemaMismatchError` for a number which JSON cannot write.

    The number was too large for the type, or has to be read by Python.
    """
    t = array.type
    if pa.types.is_list(t):
        check_finite(array.flatten())
    elif pa.types.is_struct(t):
        for part in array.flatten():
            check_finite(part)
    elif pa.types.is_floating(t) and pc.any(pc.invert(pc.is_finite(array))).as_py():
        raise SchemaMismatchError("a number is too large")
