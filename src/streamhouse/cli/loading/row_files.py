"""The rows of a file, checked against a table, batch by batch.

A row that does not fit is refused with file, line (or row, from 1) and column.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from streamhouse.cli.loading.text_blocks import ByteSource, TextBlock, text_blocks
from streamhouse.client import divided_batches
from streamhouse.core.errors import InvalidRequestError, SchemaMismatchError, listing
from streamhouse.core.model.casts.column_defaults import missing_values
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.transaction import TransactionOperation
from streamhouse.core.text.csv_rows import csv_line, csv_names, divide_csv
from streamhouse.core.text.ndjson_rows import divide_ndjson, ndjson_line
from streamhouse.core.text.text_rows import TextBounds

__all__ = [
    "FORMATS",
    "TAB",
    "FileFormat",
    "FileRows",
    "Progress",
    "RowFile",
    "format_of",
    "ignored",
    "readable",
]

FileFormat = Literal["csv", "ndjson", "parquet"]
FORMATS: Final[tuple[FileFormat, ...]] = ("csv", "ndjson", "parquet")

_SUFFIXES: Final[dict[str, FileFormat]] = {
    ".csv": "csv",
    ".ndjson": "ndjson",
    ".jsonl": "ndjson",
    ".json": "ndjson",
    ".parquet": "parquet",
}
_COMPRESSIONS: Final = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
TAB: Final = "\t"
_SEPARATORS: Final = {";": "semicolons", TAB: "tabs", "|": "bars"}
_BATCH_ROWS: Final = 65_536
# Of a body of a few megabytes of text.
_ROWS_MAX: Final = 1 << 24
_BYTES_MAX: Final = 1 << 31

Progress = Callable[[int], None]
"""Is called with the numbers of bytes of the file that have been read."""


def ignored(_: int) -> None:
    """The progress that nobody watches."""


def format_of(path: Path) -> FileFormat:
    """Return the format that a file's name tells, as in `orders.csv` and `orders.csv.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    file_format = _SUFFIXES.get(suffixes[-1]) if suffixes else None
    if file_format is None:
        raise InvalidRequestError(
            f"the name of {path} does not tell its format: give --format csv, ndjson or parquet"
        )
    return file_format


@dataclass(frozen=True, slots=True)
class FileRows:
    """Rows of a file, in the types of a table; `place` names the place of a row, as in "line 3"."""

    rows: pa.RecordBatch
    place: Callable[[int], str]


@dataclass(frozen=True, slots=True)
class RowFile:
    """A file of rows, which can be read several times."""

    path: Path
    file_format: FileFormat
    delimiter: str | None = None

    @property
    def separator(self) -> str:
        """The character between the fields of CSV."""
        return self.delimiter or ","

    @property
    def size(self) -> int:
        """The bytes of the file."""
        return self.path.stat().st_size

    def what(self, table: TableInfo) -> str:
        """Return the beginning of a refusal."""
        return f"{self.path} into '{table.path}'"

    def rows(self, table: TableInfo, progress: Progress) -> Iterator[FileRows]:
        """Yield the rows in the table's types.

        Raises an `InvalidRequestError` for the first row that does not fit, and for a column that
        the table does not have.
        """
        what = self.what(table)
        with readable(what):
            if self.file_format == "parquet":
                yield from _parquet_rows(self.path, table, what, progress)
                return
            divide = divide_csv if self.file_format == "csv" else divide_ndjson
            for block in self.blocks(progress, what=what):
                if self.file_format == "csv" and not block.lines_before:
                    _check_names(self.csv_names(block, what=what), table, what=what)
                bounds = TextBounds(
                    what=what,
                    rows_max=_ROWS_MAX,
                    bytes_max=_BYTES_MAX,
                    is_rejecting=False,
                    can_reject=False,
                    lines_before=block.lines_before,
                    delimiter=self.separator,
                )
                rows = divide(block.body, table, bounds).rows
                yield FileRows(rows, functools.partial(self._line, block))

    def _line(self, block: TextBlock, row: int) -> str:
        if self.file_format == "csv":
            line = csv_line(block.body, row, delimiter=self.separator)
        else:
            line = ndjson_line(block.body, row)
        return f"line {block.lines_before + line}"

    def csv_names(self, block: TextBlock, *, what: str) -> list[str]:
        """Return the names of the columns; refuses what looks like names with another delimiter."""
        names = csv_names(block.body, what=what, delimiter=self.separator)
        other = next((s for s in _SEPARATORS if len(names) == 1 and s in names[0]), None)
        if other and self.delimiter is None:
            raise InvalidRequestError(
                f"{what}: line 1 has {_SEPARATORS[other]} and no commas: give --delimiter"
                f" {'tab' if other == TAB else repr(other)}, or --delimiter ',' if line 1 is the"
                " name of a single column; nothing was written"
            )
        return names

    def blocks(self, progress: Progress, *, what: str) -> Iterator[TextBlock]:
        """Yield the records of a text file."""
        with self.path.open("rb") as file:
            source = _Counted(file, self.path, progress)
            for block in text_blocks(source, has_header=self.file_format == "csv", what=what):
                if not block.body:
                    raise InvalidRequestError(
                        f"{what}: the file is empty, and CSV begins with the names of the columns;"
                        " nothing was written"
                    )
                yield block


class _Counted:
    """A file that is decompressed and reports how much of it has been read."""

    def __init__(self, file: BinaryIO, path: Path, progress: Progress) -> None:
        codec = _COMPRESSIONS.get(path.suffix.lower())
        self._file, self._progress, self._position = file, progress, 0
        self._source: ByteSource = file if codec is None else pa.CompressedInputStream(file, codec)

    def read(self, size: int, /) -> bytes:
        data = self._source.read(size)
        position = self._file.tell()
        self._progress(position - self._position)
        self._position = position
        return data


def _parquet_rows(
    path: Path, table: TableInfo, what: str, progress: Progress
) -> Iterator[FileRows]:
    size = path.stat().st_size
    with pq.ParquetFile(path) as file:
        row_count = max(file.metadata.num_rows, 1)
        _check_names(file.schema_arrow.names, table, what=what)
        rows_read = bytes_read = 0
        for batch in file.iter_batches(_BATCH_ROWS):
            operation = TransactionOperation.APPEND
            for rows, checked in divided_batches(table, _with_all(batch, table), operation):
                if checked.misfits:
                    at, misfit = checked.first_misfit()
                    column = "" if misfit.column is None else f", column '{misfit.column}'"
                    raise SchemaMismatchError(
                        f"{what}: {_row(rows_read, at)}{column}: {misfit.reason};"
                        " nothing was written"
                    )
                yield FileRows(checked.rows, functools.partial(_row, rows_read))
                rows_read += rows.num_rows
            done = size * rows_read // row_count
            progress(done - bytes_read)
            bytes_read = done


def _row(rows_before: int, row: int) -> str:
    return f"row {rows_before + row + 1}"


def _with_all(batch: pa.RecordBatch, table: TableInfo) -> pa.RecordBatch:
    """Return rows with all columns; those that the file lacks have their default, or null."""
    for column in table.schema.columns:
        if column.name not in batch.schema.names:
            values = missing_values(column, batch.num_rows)
            batch = batch.append_column(pa.field(column.name, column.type), values)
    return batch


def _check_names(names: list[str], table: TableInfo, *, what: str) -> None:
    """Refuse a file that lacks columns which an upsert would replace by null."""
    missing = [column.name for column in table.schema.columns if column.name not in names]
    if missing and table.is_primary_key_table:
        raise SchemaMismatchError(
            f"{what}: the file has no {listing('column', missing)}, whose present values an upsert"
            " would replace by null; nothing was written"
        )


@contextlib.contextmanager
def readable(what: str) -> Iterator[None]:
    """Raise what a damaged or unfit file raises in the block as a sentence that begins so."""
    try:
        yield
    except InvalidRequestError as error:
        if error.message.startswith(what):
            raise
        raise type(error)(f"{what}: {error.message}; nothing was written") from error
    except (OSError, EOFError, pa.ArrowException) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise InvalidRequestError(f"{what}: the file cannot be read: {reason}") from error
