"""Where and with how much memory the records of a batch are read."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pyarrow as pa
import pytest

from streamhouse.core.model.records.record_format import RAW_TOPIC
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.kafka.protocol_errors import InvalidRecordsError, RecordsFault
from streamhouse.storage_service.kafka.records.batches import Compression
from streamhouse.storage_service.kafka_door.producing._decoding import (
    decoded,
    decoded_inline,
    inline_bounds,
    inline_share,
    tried_bytes,
)
from tests.support.kafka_batches import produced
from tests.support.kafka_records import columns_of, record_table

_CONFIG: Final = ServiceConfig(data_dir=Path("unused"))
_SCHEMA: Final = pa.schema([("id", pa.int64()), ("items", pa.list_(pa.int64()))])
_RAW: Final = record_table(RAW_TOPIC)
_JSON: Final = record_table(_SCHEMA, value_format="json")
_REJECTING: Final = record_table(_SCHEMA, value_format="json", on_error="reject")


def _headed(record_count: int, header_count: int) -> bytes:
    headers = [[{"key": "", "value": None}] * header_count] * record_count
    return produced(
        columns_of([b"v"] * record_count, headers=headers), compression=Compression.ZSTD
    )


@pytest.mark.parametrize(("record_count", "header_count"), [(1, 1_001), (201, 1_000)])
def test_a_few_bytes_are_not_taken_for_very_many_headers(
    record_count: int, header_count: int
) -> None:
    with pytest.raises(InvalidRecordsError, match="headers, at most") as refused:
        decoded(_headed(record_count, header_count), _RAW, 0, _CONFIG)
    # Clients that can make smaller batches do so.
    assert refused.value.fault is RecordsFault.TOO_LARGE


def test_headers_that_take_long_are_not_read_on_the_event_loop() -> None:
    few, many = _headed(20, 100), _headed(20, 101)

    assert decoded_inline(few, _RAW, 0, _CONFIG, None, 1 << 20) is not None
    assert decoded_inline(many, _RAW, 0, _CONFIG, None, 1 << 20) is None
    assert decoded(many, _RAW, 0, _CONFIG).record_count == 20


def test_records_with_columns_are_read_on_the_event_loop_if_they_are_few_and_small() -> None:
    columns, raw = inline_bounds(_JSON, _CONFIG), inline_bounds(_RAW, _CONFIG)
    small = produced(columns_of([b'{"id": 1}'] * 800))
    many = produced(columns_of([b"{}"] * 801))
    large = produced(columns_of([b'{"items": [' + b"1," * 40_000 + b"1]}"]))

    assert [inline_share(data, columns) <= 1 for data in (small, many, large)] == [
        True,
        False,
        False,
    ]
    assert all(inline_share(data, raw) <= 1 for data in (small, many, large))


def test_a_few_bytes_that_are_many_objects_are_not_read_on_the_event_loop() -> None:
    value = b'{"items": [' + b"1," * 40_000 + b"1]}"
    data = produced(columns_of([value]), compression=Compression.ZSTD)
    bounds = inline_bounds(_JSON, _CONFIG)
    assert inline_share(data, bounds) < 0.1

    assert decoded_inline(data, _JSON, 0, _CONFIG, None, bounds.bytes_max) is None


def test_what_bad_records_hold_until_they_are_stored_is_counted_and_is_no_more_than_came() -> None:
    value = b'{"other": [' + b"{}," * 10_000 + b"{}]}"
    data = produced(columns_of([value] * 3), compression=Compression.ZSTD)

    found = decoded(data, _REJECTING, 0, _CONFIG)

    assert found.rejecting is not None
    assert len(found.rejecting.misfits) == 3
    assert 3 * len(value) <= found.nbytes < 4 * len(value)
    assert found.rejecting.original_of(0) == {"other": [{}] * 10_001}


def test_a_bad_record_that_is_cut_anyway_is_kept_as_text() -> None:
    value = b'{"other": [' + b"1," * 600_000 + b"1]}"

    found = decoded(produced(columns_of([value])), _REJECTING, 0, _CONFIG)

    assert found.rejecting is not None
    assert found.rejecting.original_of(0)["kafka.value"] == value.decode()


def test_memory_is_reserved_for_what_a_batch_mostly_is_and_then_for_what_it_may_be() -> None:
    plain = produced(columns_of([b"x" * 100_000]))
    packed = produced(columns_of([b"x" * 100_000]), compression=Compression.ZSTD)
    most = _CONFIG.batch_bytes_max

    assert tried_bytes(plain, _CONFIG, inline_max=0) == [len(plain)]
    assert tried_bytes(packed, _CONFIG, inline_max=0) == [64 << 10, most]
    assert tried_bytes(packed, _CONFIG, inline_max=64 << 10) == [most]
