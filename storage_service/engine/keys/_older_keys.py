"""The keys of a bucket's rows that were written below an offset, a piece at a time."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator

import pyarrow as pa

from streamhouse.core.errors import StreamhouseError
from streamhouse.storage_service.engine.keys._key_writer import KeyWriter
from streamhouse.storage_service.kv.kv_tablet import KvTablet

__all__ = ["older_keys"]


async def older_keys(
    writer: KeyWriter,
    rows: KvTablet,
    offset: int,
    *,
    bytes_max: int,
    until_done: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]] | None = None,
    measured: Callable[[Callable[[], None]], None] | None = None,
) -> AsyncGenerator[pa.RecordBatch]:
    """Yield the keys of `rows` written below `offset`, for about `bytes_max` of rows at a time.

    The keys are from the moment of the first step; rows may be written again meanwhile, and a piece
    may be empty. The writer lends the rows for each step, through `until_done` if present, which
    may repeat a step after an error: then the search begins again. With `measured`, the thread with
    the rows runs the step through `measured`. Call `aclose` on an unfinished search.
    """
    pieces: Generator[pa.RecordBatch] | None = None
    keys: pa.RecordBatch | None = None

    def advance() -> None:
        nonlocal pieces, keys
        if pieces is None:
            pieces = rows.rows_written_before(offset, bytes_max=bytes_max)
        try:
            older = next(pieces, None)
            keys = None if older is None else older.select(list(rows.rules.primary_key))
        except StreamhouseError:
            close()
            raise

    look = advance if measured is None else functools.partial(measured, advance)

    def close() -> None:
        nonlocal pieces
        if pieces is not None:
            pieces.close()
        pieces = None

    async def step() -> None:
        await writer.on_thread(look)

    try:
        while True:
            await (step() if until_done is None else until_done(step))
            if keys is None:
                return
            yield keys
    finally:
        await writer.on_thread(close)
