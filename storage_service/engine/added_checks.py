"""Constraints on their way to a table that has rows, and perhaps writers.

1. The existing rows are judged in bounded pieces, beside reads and writes: rows by key, or the rows
   in the log. Rows of a log table that have left the log are judged by the caller
   (`server/control/_lake_rows.py`).
2. The change holds the table's gate, without open transactions. The rows written since are judged,
   and the constraints begin together with the change's other properties.

Rows judged by the former constraints are refused afterwards (`OpenTable.check_versions`). A
constraint with `existing = not enforced` skips the rows that the table has; without that property
later, the constraint is added as any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import CheckFailedError, UnavailableError
from streamhouse.core.model.changelog import INSERT, UPDATE_AFTER
from streamhouse.core.model.offsets import BucketPositions
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.values.checks import CheckText, existing_property, is_existing_checked
from streamhouse.reading.where.checks import Checks, shown_values
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.transactions.table_transactions import TableTransactions

__all__ = ["AddedChecks"]

_PIECE_BYTES: Final = 4 << 20
_EVERY_OFFSET: Final = 1 << 62
_QUIET_WAIT_S: Final = 2.0
_QUIET_LOOK_S: Final = 0.005


class AddedChecks:
    """The constraints that a change adds, and what the existing rows say."""

    def __init__(self, table: OpenTable, changed: TableInfo, runtime: Runtime) -> None:
        self._runtime = runtime
        self._table = table
        self._info = changed
        checked = _checked(changed) - _checked(table.info)
        self.checks: Final = Checks.of_table(changed).only(checked)
        """The added constraints that existing rows must hold."""
        self._offsets: dict[int, int] = {}
        self._rows: dict[str, int] = {}
        self._examples: dict[str, str] = {}

    def of_lake(self) -> Mapping[int, range]:
        """Return the offsets of the rows that only the lake has, by bucket, for `judge`."""
        if not self.checks or isinstance(self._table, KeyTable):
            return {}
        return {
            bucket: range(at.first_offset, end)
            for bucket, at in self._table.positions().items()
            if at.first_offset < (end := _lake_end(at))
        }

    def judge(self, rows: pa.RecordBatch) -> None:
        """Count the rows that break a constraint. On any thread, in turn."""
        for check, mask in self.checks.broken(rows):
            name = check.text.name
            self._rows[name] = self._rows.get(name, 0) + int(mask.sum())
            if name not in self._examples:
                self._examples[name] = f"{check}: {shown_values(check, rows, int(mask.argmax()))}"

    def judged_lake(self, bucket: int, end: int) -> None:
        """Record that the rows of a bucket below the offset `end` are judged."""
        self._offsets[bucket] = end

    async def prepare(self, transactions: TableTransactions) -> None:
        """Judge the existing rows, besides rows of a log table that left the log.

        Waits some seconds for a moment without an open transaction. Raises `CheckFailedError` with
        the number of rows that break a constraint, and an example.
        """
        table = self._table
        if self.checks and isinstance(table, KeyTable):
            await self._judge_keys(table)
        elif self.checks:
            await self._judge_log()
        self._refuse()
        if self._info.descriptor.checks <= table.info.descriptor.checks:
            return
        deadline_s = self._runtime.monotonic_s() + _QUIET_WAIT_S
        while transactions.open_count and self._runtime.monotonic_s() < deadline_s:
            # A stream has a transaction for each batch, and none between two batches.
            await asyncio.sleep(_QUIET_LOOK_S)

    @contextlib.asynccontextmanager
    async def taking_effect(
        self, table: OpenTable, changed: TableInfo, transactions: TableTransactions
    ) -> AsyncIterator[None]:
        """Hold the table without writes and open transactions while it becomes `changed`."""
        if not self.checks and changed.descriptor.checks <= table.info.descriptor.checks:
            yield
            return
        if table is not self._table:
            raise UnavailableError(f"table '{table.path}' was made anew just now; try again")
        self._info = changed
        async with table.gate.alone():
            table.gate.stop(UnavailableError(f"table '{table.path}' gets a constraint; try again"))
            try:
                transactions.check_none_open()
                await table.settle()
                if self.checks:
                    await self._judge_log()
                    self._refuse()
                yield
            finally:
                table.keep_lake(table.lake)

    async def _judge_keys(self, table: KeyTable) -> None:
        for number, bucket in enumerate(table.key_buckets):
            bucket.check_writable()
            # Later rows are judged from the log.
            self._offsets[number] = bucket.log.high_watermark
            pieces = bucket.rows.rows_written_before(_EVERY_OFFSET, bytes_max=_PIECE_BYTES)
            advance = functools.partial(next, pieces, None)
            try:
                while (rows := await table.key_writer.on_thread(advance)) is not None:
                    self.judge(rows)
            finally:
                await table.key_writer.on_thread(pieces.close)

    async def _judge_log(self) -> None:
        for bucket, at in self._table.positions().items():
            start = self._offsets.get(bucket, at.first_offset)
            start = max(start, at.first_offset)
            if start < _lake_end(at):
                raise UnavailableError(
                    f"table '{self._table.path}', bucket {bucket}: rows from offset {start} on have"
                    " left the log, and were not judged by the new constraint; try again, by HTTP"
                    " or by a client of Streamhouse, or set"
                    f" {existing_property(self.checks.checks[0].text.name)} = not enforced"
                )
            # Rows that neither the log nor the lake has are gone.
            start = max(start, at.log_start_offset)
            pieces = self._logged(bucket, start, at.high_watermark)
            while (rows := await self._runtime.run(next, pieces, None)) is not None:
                self.judge(rows)
            self._offsets[bucket] = max(start, at.high_watermark)

    def _logged(self, bucket: int, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows that the log has from offset `start` on; of changes, the new rows."""
        table, info = self._table, self._info
        while start < end:
            frames = table.tablets[bucket].read(start, bytes_max=_PIECE_BYTES, end_offset=end)
            for frame in frames:
                rows = table.rows_of(frame, info, schema_id=info.schema_id)
                rows = rows.slice(max(0, start - frame.base_offset))
                if info.is_primary_key_table:
                    kinds = rows.column(CHANGE_TYPE_COLUMN)
                    new = pa.array([INSERT, UPDATE_AFTER], kinds.type)
                    rows = rows.filter(pc.is_in(kinds, value_set=new))
                yield rows
                start = frame.end_offset

    def _refuse(self) -> None:
        if not self._rows:
            return
        name, count = next(iter(self._rows.items()))
        error = CheckFailedError(
            f"table '{self._table.path}': {count} of its rows break {self._examples[name]}; nothing"
            f" was changed. Mend the rows, or set {existing_property(name)} = not enforced"
            " (NOT ENFORCED FOR EXISTING) to judge new rows only"
        )
        error.broken = (str(self._table.path), name, count)
        raise error


def _checked(info: TableInfo) -> frozenset[CheckText]:
    """Return the constraints that all rows of a table hold, or will have to hold."""
    descriptor, name = info.descriptor, str(info.path)
    return frozenset(
        text
        for text in descriptor.checks
        if is_existing_checked(descriptor.properties, text.name, table=name)
    )


def _lake_end(at: BucketPositions) -> int:
    """Return the end of the rows that the log has no more and the lake has."""
    return min(at.log_start_offset, at.tiered_offset)
