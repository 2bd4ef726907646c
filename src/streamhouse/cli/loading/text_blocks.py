"""A text file cut into bodies of whole records, as the readers of `core.text` take them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from streamhouse.core.errors import InvalidRequestError

__all__ = ["BlockLimits", "ByteSource", "TextBlock", "text_blocks"]


class ByteSource(Protocol):
    """A file or a stream of bytes."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class TextBlock:
    """Whole records of a file; of a CSV file below the file's header.

    `lines_before` is the difference of a line's number in the file and in the body.
    """

    body: bytes
    lines_before: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLimits:
    """How much is read at once, and the most lines of a block and bytes of a record."""

    read_bytes: int = 4 << 20
    # Some columns of JSON are read one by one, in bodies of so many lines at most.
    lines_max: int = 65_536
    # A row of a table has 31 MiB at most.
    record_bytes_max: int = 64 << 20


_LIMITS: Final = BlockLimits()


def text_blocks(
    source: ByteSource, *, has_header: bool, what: str, limits: BlockLimits = _LIMITS
) -> Iterator[TextBlock]:
    """Yield the records of CSV, if there is a header, or of NDJSON; of CSV at least one block."""
    header, lines, count = b"", 0, 0
    for records in _records(source, is_quoting=has_header, what=what, limits=limits):
        if has_header and not count:
            header = records[: _ends(records, is_quoting=True)[:1].sum()]
            yield TextBlock(records, 0)
        else:
            yield TextBlock(header + records, lines - header.count(b"\n"))
        lines += records.count(b"\n")
        count += 1
    if has_header and not count:
        yield TextBlock(b"", 0)


def _records(
    source: ByteSource, *, is_quoting: bool, what: str, limits: BlockLimits
) -> Iterator[bytes]:
    waiting, lines = b"", 0
    while True:
        piece = source.read(limits.read_bytes)
        waiting += piece
        ends = _ends(waiting, is_quoting=is_quoting)
        start = 0
        for end in [*ends[limits.lines_max - 1 :: limits.lines_max], *ends[-1:]]:
            if end > start:
                yield waiting[start:end]
                lines += waiting.count(b"\n", start, end)
                start = int(end)
        waiting = waiting[start:]
        if not piece:
            break
        if len(waiting) > limits.record_bytes_max:
            quote = " or its quote is never closed" if is_quoting else ""
            raise InvalidRequestError(
                f"{what}: line {lines + 1} has more than {limits.record_bytes_max:,} bytes{quote};"
                " nothing was written"
            )
    if waiting:
        yield waiting


def _ends(data: bytes, *, is_quoting: bool) -> npt.NDArray[np.int64]:
    """Return the ends of the records: behind the ends of lines outside of quotes."""
    characters = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(characters == ord("\n"))
    if is_quoting and b'"' in data:
        quotes = np.flatnonzero(characters == ord('"'))
        ends = ends[np.searchsorted(quotes, ends) % 2 == 0]
    return ends + 1
