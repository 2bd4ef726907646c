"""Records as rows and rows as records, in one thread: raw, JSON, Debezium's envelopes, Avro.

Rows of three columns, 10,000 in a batch of records. The limit of JSON is what Arrow's reader makes
of the same texts, and what polars writes of the same rows.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Final

import numpy as np
import polars
import pyarrow as pa
import pyarrow.json

from benchmarks.harness import processor_rate, report
from streamhouse.core.model.changelog import UPDATE_AFTER
from streamhouse.core.model.records.record_format import RAW_TOPIC
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.storage_service.kafka.avro_schema import avro_text_of
from streamhouse.storage_service.kafka.records import RecordColumns
from streamhouse.storage_service.kafka.values import records_of, rows_of
from tests.support.kafka_records import record_table

BATCH: Final = 10_000
TURNS: Final = 9
CALLS: Final = 5
BYTES_MAX: Final = 256 << 20
BAR_READ: Final = 500_000
BAR_WRITTEN: Final = 300_000
BAR_RAW: Final = 1_000_000
COLUMNS: Final = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), ("name", pa.string()), ("v", pa.float64())]
)


class _Schemas:
    """One schema of Avro, of the columns that are measured."""

    text: Final = avro_text_of(list(COLUMNS), name="row")

    def schema(self, _schema_id: int, /) -> str:
        return self.text

    def latest(self, _path: TablePath, _part: str, /) -> tuple[int, str]:
        return 1, self.text


def main() -> None:
    """Report records/s of a processor, read and written, for each format."""
    texts = [b'{"id":%d,"name":"name %d","v":%.3f}' % (n, n, n * 1.5) for n in range(BATCH)]
    keys = pa.array([b'{"id":%d}' % n for n in range(BATCH)], pa.binary())
    values = pa.array(texts, pa.binary())
    whole = b"\n".join(texts)
    arrow = _rate(lambda: _arrow_rows(whole))
    _report_raw(_records(values, keys))

    log = record_table(COLUMNS, value_format="json")
    rows = _rows(_records(values), log)
    frame = polars.from_arrow(rows)
    assert isinstance(frame, polars.DataFrame)
    written = _rate(lambda: frame.write_ndjson(io.BytesIO()))
    _report("json", _records(values), log, rows, limits=(arrow, written))
    keyed = record_table(COLUMNS, ("id",), value_format="json")
    changes = rows.append_column(CHANGE_TYPE_COLUMN, pa.array([UPDATE_AFTER] * BATCH, pa.int8()))
    name = "json with keys, of a table with a primary key"
    _report(name, _records(values, keys), keyed, changes, limits=(arrow, written))

    debezium = record_table(
        COLUMNS, ("id",), value_format="debezium-json", changes_format="debezium-json"
    )
    envelopes = records_of(changes, debezium, commit_ms=0).columns
    _report("debezium-json", envelopes, debezium, changes, limits=(arrow, written), has_bar=False)
    avro = record_table(COLUMNS, value_format="avro")
    framed = records_of(rows, avro, commit_ms=0, schemas=_Schemas()).columns
    _report("avro", framed, avro, rows, limits=(arrow, written))


def _arrow_rows(whole: bytes) -> pa.Table:
    return pyarrow.json.read_json(
        pa.BufferReader(whole),
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(whole) + 1),
        parse_options=pyarrow.json.ParseOptions(
            explicit_schema=COLUMNS, unexpected_field_behavior="error"
        ),
    )


def _records(values: pa.BinaryArray, keys: pa.BinaryArray | None = None) -> RecordColumns:
    return RecordColumns(
        keys=pa.nulls(len(values), pa.binary()) if keys is None else keys,
        values=values,
        timestamps_ms=np.full(len(values), 1_700_000_000_000),
    )


def _rows(records: RecordColumns, table: TableInfo) -> pa.RecordBatch:
    found = rows_of(records, table, bytes_max=BYTES_MAX, schemas=_Schemas())
    assert not found.misfits
    return found.rows


def _report_raw(records: RecordColumns) -> None:
    table = record_table(RAW_TOPIC)
    rows = _rows(records, table)
    copy = _rate(lambda: b"".join(records.values.to_pylist()))
    for verb, rate in (
        ("read", _rate(lambda: _rows(records, table))),
        ("written", _rate(lambda: records_of(rows, table, commit_ms=0))),
    ):
        report(
            f"raw: {BATCH:,} records {verb}",
            measured=f"{rate / 1e6:.1f} M records/s of processor",
            limit=f"an object of each, and one copy: {copy / 1e6:.1f} M records/s",
            ratio=rate / copy,
            bar=f"at least {BAR_RAW / 1e6:g} M records/s",
            reached=rate >= BAR_RAW,
        )


def _report(
    name: str,
    records: RecordColumns,
    table: TableInfo,
    rows: pa.RecordBatch,
    *,
    limits: tuple[float, float],
    has_bar: bool = True,
) -> None:
    def write() -> None:
        records_of(rows, table, commit_ms=0, schemas=_Schemas())

    for verb, work, limit, bar, what in (
        ("read", lambda: _rows(records, table), limits[0], BAR_READ, "Arrow's reader of JSON"),
        ("written", write, limits[1], BAR_WRITTEN, "polars' writer of JSON"),
    ):
        rate = _rate(work)
        report(
            f"{name}: {BATCH:,} records {verb}",
            measured=f"{rate / 1e6:.2f} M records/s of processor",
            limit=f"{what}: {limit / 1e6:.1f} M rows/s",
            ratio=rate / limit,
            bar=f"at least {bar / 1e6:g} M records/s" if has_bar else "not set",
            reached=rate >= bar if has_bar else None,
        )


def _rate(work: Callable[[], object]) -> float:
    """Return records a second of processor, the median of some turns."""
    return processor_rate(work, BATCH, turns=TURNS, calls=CALLS)


if __name__ == "__main__":
    main()
