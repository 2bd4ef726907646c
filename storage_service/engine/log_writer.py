"""Appending to log tables: batches with their buckets in, one commit unit, where the rows are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from streamhouse.storage_service.engine.appended import Appended
from streamhouse.storage_service.engine.keys.key_writer import Submit
from streamhouse.storage_service.engine.open_table import LogTable
from streamhouse.storage_service.engine.runtime import clock_us
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.group_commit import CommitOutcome

__all__ = ["append_batches"]


async def append_batches(
    table: LogTable, batches: Sequence[RoutedBatch], *, submit: Submit
) -> Appended:
    """Append all batches or none; they are durable and visible on return.

    Once submitted the append happens, whatever becomes of the caller. A transaction of the table
    that is being committed comes first.
    """
    if not batches:
        return Appended(ranges={}, timestamp_us=clock_us())
    unit = [(table.tablet(batch.bucket), batch) for batch in batches]
    done: asyncio.Future[CommitOutcome] = asyncio.get_running_loop().create_future()

    def on_done(outcome: CommitOutcome) -> None:
        table.gate.leave()
        if not done.done():
            done.set_result(outcome)

    await table.gate.enter()
    try:
        submit(unit, on_done)
    except BaseException:
        table.gate.leave()
        raise
    outcome = await done
    if outcome.error is not None:
        raise outcome.error
    ranges: dict[int, tuple[int, int]] = {}
    for batch, result in zip(batches, outcome.results, strict=True):
        start, end = ranges.get(batch.bucket, (result.base_offset, result.end_offset))
        ranges[batch.bucket] = (min(start, result.base_offset), max(end, result.end_offset))
    timestamp_us = max(result.timestamp_us for result in outcome.results)
    return Appended(ranges=ranges, timestamp_us=timestamp_us)
