"""A fetch takes as many bytes as it may, whatever rows are like; changes of log and lake are alike.

Rows are in a real log in memory, or in a lake in memory, and are read by the writer of Fetch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.core.errors import NotFoundError
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.core.wire.arrow_body import encode_payload
from streamhouse.storage_service.kafka_door.fetching._partition_records import (
    RecordsWriter,
    TableRecords,
)
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.log_tablet import LogTablet
from streamhouse.storage_service.server.history._lake_cursors import LakeCursors
from tests.support.crash_filesystem import CrashFilesystem
from tests.support.examples import examples
from tests.support.fetch_world import MemoryHistory, next_offset_after, records_in
from tests.support.kafka_records import record_table
from tests.support.log_world import open_log

SCHEMAS: Final = {
    "json": pa.schema([pa.field("text", pa.string())]),
    "raw": pa.schema([pa.field("text", pa.binary())]),
}
# Of a text of so many characters; one of \x01 is six characters of JSON each.
_ROWS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 3, 50, 700, 3_000]),
        st.sampled_from(["a", "\x01"]),
        st.sampled_from([1, 1, 2, 40, 1_100]),
    ),
    min_size=1,
    max_size=4,
)


class NoSchemas:
    """Knows no schema of Avro."""

    def schema(self, schema_id: int) -> str:
        raise NotFoundError(f"no schema {schema_id}")

    def table_schema(self, schema_id: int, /) -> int | None:
        return 0

    def latest(self, path: TablePath, part: str) -> tuple[int, str]:
        raise NotFoundError(f"no schema of {path}, {part}")


def table_records(info: TableInfo, schema: pa.Schema) -> TableRecords:
    return TableRecords(info, schema, info.descriptor.record_format(), NoSchemas())


def logged(*batches: pa.RecordBatch) -> LogTablet:
    log = open_log(CrashFilesystem(0))
    for rows in batches:
        log.append(RoutedBatch(0, rows.num_rows, bytes(encode_payload(rows)), 0))
        log.flush()
    log.publish()
    return log


def text_table(form: str) -> TableRecords:
    return table_records(record_table(SCHEMAS[form], value_format=form), SCHEMAS[form])


def texts(form: str, runs: Sequence[tuple[int, str, int]]) -> pa.RecordBatch:
    made = [letter * size for size, letter, count in runs for _ in range(count)]
    return pa.record_batch([pa.array(made).cast(SCHEMAS[form].field(0).type)], schema=SCHEMAS[form])


class Tiers:
    """The same rows in a log and in a lake."""

    def __init__(self, table: TableRecords, *batches: pa.RecordBatch) -> None:
        self.table, self.log = table, logged(*batches)
        self.end = self.log.high_watermark
        history, first = MemoryHistory(), 0
        for rows in batches:
            history.keep(0, first, 1_000_000, rows)
            first += rows.num_rows
        self.history = history
        self.cursors = LakeCursors(history)

    def fetched(self, tier: str, offset: int, bytes_max: int, *, is_first: bool) -> RecordsWriter:
        writer = RecordsWriter(
            table=self.table, first_offset=offset, bytes_max=bytes_max, is_first=is_first
        )
        if tier == "log":
            writer.write_log(self.log, end=self.end)
        else:
            self._write_older(writer)
        writer.cover_gap()
        return writer

    def _write_older(self, writer: RecordsWriter) -> None:
        while writer.older_offset < self.end and writer.has_room:
            found = self._older(writer.older_offset, writer.rows_estimate, writer.bytes_estimate)
            before = None
            if writer.lacks_replaced_row(found) and writer.next_offset > 0:
                before = self._older(writer.next_offset - 1, 1, 1)
            writer.write_older(found, replaced_row=before)
        writer.pass_over(self.end)
        if writer.pending_rows is not None:
            info, offset = self.table.info, writer.next_offset
            self.cursors.give_back(info, 0, writer.pending_rows, offset=offset)

    def _older(self, offset: int, rows_max: int, bytes_max: int) -> Any:
        return self.cursors.read(
            *(self.table.info, LakeState(), 0),
            offset=offset,
            rows_max=rows_max,
            bytes_max=bytes_max,
            check=lambda _: None,
        )

    def consumed(self, tier: str, offset: int, bytes_max: int) -> list[tuple[int, Any]]:
        """What a consumer reads from an offset on, fetch by fetch: offsets and values."""
        values: list[tuple[int, Any]] = []
        while offset < self.end:
            data = b"".join(self.fetched(tier, offset, bytes_max, is_first=True).pieces)
            values += [(r.offset, r.value) for r in records_in(data, since=offset)]
            assert next_offset_after(data) > offset
            offset = next_offset_after(data)
        return values


@pytest.mark.parametrize("tier", ["log", "lake"])
@pytest.mark.parametrize("form", SCHEMAS)
@settings(max_examples=examples(20), deadline=None)
@given(
    batches=st.lists(_ROWS, min_size=1, max_size=3),
    bytes_max=st.sampled_from([1, 68, 100, 1_000, 10_000, 100_000, 3_000_000]),
    is_first=st.booleans(),
    start=st.integers(0, 100),
)
def test_an_answer_is_no_larger_than_it_may_be_unless_it_is_one_record(
    tier: str,
    form: str,
    batches: list[list[tuple[int, str, int]]],
    bytes_max: int,
    is_first: bool,
    start: int,
) -> None:
    tiers = Tiers(text_table(form), *(texts(form, runs) for runs in batches))
    offset = start % tiers.end

    writer = tiers.fetched(tier, offset, bytes_max, is_first=is_first)

    data = b"".join(writer.pieces)
    found = records_in(data)
    assert len(data) == writer.byte_count
    assert len(data) <= bytes_max or (is_first and len(found) == 1)
    assert [record.offset for record in found] == [*range(offset, writer.next_offset)]
    if is_first:
        assert found
    rows = texts(form, [run for runs in batches for run in runs]).column(0)
    wanted = rows.slice(offset, len(found)).to_pylist()
    values = [record.value or b"" for record in found]
    assert wanted == (values if form == "raw" else [json.loads(v)["text"] for v in values])


def changes() -> tuple[TableRecords, tuple[pa.RecordBatch, ...]]:
    """Forty changes of a table with a key: inserts, updates, deletes."""
    info = record_table(
        pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())]),
        ("id",),
        changes_format="debezium-json",
    )
    schema = info.log_schema
    kinds = [1, 2, 3, 2, 3, 4, 1, 2, 3, 2, 3, 1, 1, 2, 3, 4, 4, 2, 3, 1]
    batches = []
    for turn in range(2):
        columns: dict[str, list[Any]] = {
            "id": [n // 2 for n in range(len(kinds))],
            "name": [f"{turn}-{n}".ljust(n * 9) for n in range(len(kinds))],
        }
        arrays = []
        for field in schema:
            values = columns.get(field.name)
            if values is None:
                values = kinds if field.name == "__change_type" else [None] * len(kinds)
            arrays.append(pa.array(values, field.type))
        batches.append(pa.record_batch(arrays, schema=schema))
    return table_records(info, schema), tuple(batches)


@pytest.mark.parametrize("bytes_max", [1, 150, 400, 1_500, 1 << 20])
def test_changes_that_have_left_the_log_are_the_same(bytes_max: int) -> None:
    table, batches = changes()
    tiers = Tiers(table, *batches)
    whole = tiers.consumed("log", 0, 1 << 20)
    assert sum(json.loads(value)["before"] is not None for _, value in whole) == 18

    assert tiers.consumed("lake", 0, bytes_max) == whole
    for start in range(tiers.end):
        wanted = [(offset, value) for offset, value in whole if offset >= start]
        for tier in ("log", "lake"):
            writer = tiers.fetched(tier, start, bytes_max, is_first=True)
            found = [(r.offset, r.value) for r in records_in(b"".join(writer.pieces), since=start)]
            assert found == wanted[: len(found)]
            assert found or writer.next_offset == tiers.end


def test_rows_that_did_not_fit_are_not_read_again() -> None:
    tiers = Tiers(text_table("json"), texts("json", [(50, "\x01", 100)]))

    assert len(tiers.consumed("lake", 0, 1_000)) == 100
    assert tiers.history.opened == 1
