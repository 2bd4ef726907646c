"""The keys of a bucket's rows that were written below an offset, a piece at a time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator

import pyarrow as pa

from streamhouse.storage_service.engine.keys.key_writer import KeyWriter
from streamhouse.storage_service.errors import StreamhouseError
from streamhouse.storage_service.kv.kv_tablet import KvTablet

__all__ = ["older_keys"]


async def older_keys(
    writer: KeyWriter,
    rows: KvTablet,
    offset: int,
    *,
    bytes_max: int,
    until_done: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]] | None = None,
) -> AsyncGenerator[pa.RecordBatch]:
    """Yield the keys of `rows` written below `offset`, those of about `bytes_max` of rows a time.

    They are those of the first step; what is yielded may be written meanwhile, and may have no
    keys. Each step has the rows from the writer, by `until_done` if that is given, which may run it
    again after an error: all begins anew then. `aclose` it, if it was not used up.
    """
    older = _OlderRows(rows, offset, bytes_max)

    async def step() -> None:
        await writer.on_thread(older.advance)

    try:
        while True:
            await (step() if until_done is None else until_done(step))
            if older.keys is None:
                return
            yield older.keys
    finally:
        await writer.on_thread(older.close)


class _OlderRows:
    """What is left to yield; started over after an error."""

    def __init__(self, rows: KvTablet, offset: int, bytes_max: int) -> None:
        self._rows = rows
        self._offset = offset
        self._bytes_max = bytes_max
        self._pieces: Generator[pa.RecordBatch] | None = None
        self.keys: pa.RecordBatch | None = None

    def advance(self) -> None:
        """Set `keys` to those of the next piece, None after the last; for who has the rows."""
        if self._pieces is None:
            self._pieces = self._rows.keys_written_before(self._offset, bytes_max=self._bytes_max)
        try:
            self.keys = next(self._pieces, None)
        except StreamhouseError:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the rows' files; for who has the rows."""
        if self._pieces is not None:
            self._pieces.close()
        self._pieces = None
