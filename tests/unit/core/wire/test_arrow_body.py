"""Append and fetch bodies: what goes in comes out, and nothing malformed gets in."""

from __future__ import annotations

import contextlib
import io
import random
import struct

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from streamhouse.core.errors import (
    InvalidRequestError,
    RequestTooLargeError,
    SchemaMismatchError,
    StreamhouseError,
    UnknownColumnError,
)
from streamhouse.core.model.schema import Schema
from streamhouse.core.wire.arrow_body import (
    BatchAddress,
    decode_append,
    decode_fetch_body,
    decode_payload,
    encode_append_body,
    encode_fetch_body,
    encode_payload,
    project_payload,
)
from streamhouse.core.wire.request_stream import RequestBatch, open_request
from tests.support.big_endian import big_endian_stream

SCHEMA = Schema.from_arrow(
    pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
)
ROWS = pa.record_batch({"id": range(10), "name": [f"n{i}" for i in range(10)]}).cast(
    SCHEMA.to_arrow()
)


def _decode(body: bytes | pa.Buffer, **limits: int) -> list[RequestBatch]:
    defaults = {"rows_max": 1_000, "batch_bytes_max": 100_000, "batches_max": 10} | limits
    stream = open_request(memoryview(body), what="append to 'a.b'", **defaults)
    return decode_append(stream, SCHEMA, table="a.b")


def _stream(batch: pa.RecordBatch, **options: object) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def test_parts_keep_bucket_sequence_and_rows() -> None:
    body = encode_append_body(SCHEMA.to_arrow(), [(3, 7, ROWS), (0, 0, ROWS.slice(2, 5))])

    parts = _decode(body)

    assert [(p.bucket, p.sequence) for p in parts] == [(3, 7), (0, 0)]
    assert [p.batch for p in parts] == [ROWS, ROWS.slice(2, 5)]
    assert [decode_payload(memoryview(p.payload), SCHEMA.to_arrow()) for p in parts] == [
        ROWS,
        ROWS.slice(2, 5),
    ]


def test_stored_bytes_are_the_clients_own() -> None:
    body = bytes(encode_append_body(SCHEMA.to_arrow(), [(1, 1, ROWS)]))

    (part,) = _decode(body)

    assert bytes(part.payload) in body


def test_plain_streams_of_other_column_order_and_width_are_conformed() -> None:
    narrow = pa.record_batch({"name": ["x"], "id": pa.array([5], pa.int16())})

    (part,) = _decode(_stream(narrow))

    assert part.bucket is None
    assert decode_payload(memoryview(part.payload), SCHEMA.to_arrow()).to_pylist() == [
        {"id": 5, "name": "x"}
    ]


def test_empty_batches_are_dropped() -> None:
    assert _decode(encode_append_body(SCHEMA.to_arrow(), [(0, 1, ROWS.slice(0, 0))])) == []


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"rows_max": 19}, "20 rows in one request; at most 19"),
        ({"batches_max": 1}, "more than 1 batches in one request"),
        ({"batch_bytes_max": 100}, "at most 100, send smaller batches"),
    ],
)
def test_limits_are_checked_before_anything_is_decoded(
    limits: dict[str, int], message: str
) -> None:
    body = encode_append_body(SCHEMA.to_arrow(), [(0, 1, ROWS), (1, 1, ROWS)])

    with pytest.raises(RequestTooLargeError) as refused:
        _decode(body, **limits)

    assert message in refused.value.message


def test_compressed_batches_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="compressed record batches are not accepted"):
        _decode(_stream(ROWS, compression="zstd"))


_TEXT: pa.DataType = pa.large_string()
_VIEW: pa.DataType = pa.string_view()


@pytest.mark.parametrize(
    ("viewed", "plain", "values"),
    [
        (_VIEW, _TEXT, ["a", None, "b" * 20]),
        (pa.binary_view(), pa.large_binary(), [b"a", None, b"b" * 20]),
        (pa.list_(_VIEW), pa.list_(_TEXT), [["a"], None, ["b" * 20, None]]),
        (pa.large_list(_VIEW), pa.large_list(_TEXT), [["a"], None, ["b" * 20]]),
        (pa.list_(_VIEW, 2), pa.list_(_TEXT, 2), [["a", "b"], None, ["c" * 20, None]]),
        (pa.struct([("x", _VIEW)]), pa.struct([("x", _TEXT)]), [{"x": "a"}, None, {"x": "b" * 20}]),
        (pa.map_(_TEXT, _VIEW), pa.map_(_TEXT, _TEXT), [[("a", "b" * 20)], None, []]),
    ],
    ids=str,
)
def test_views_are_read_as_what_they_are_views_of(
    viewed: pa.DataType, plain: pa.DataType, values: list[object]
) -> None:
    column = pa.array(values, plain).cast(viewed)
    rows = pa.RecordBatch.from_arrays([column, pa.array([1, 2, 3])], names=["v", "n"])
    limits = {"rows_max": 10, "batch_bytes_max": 1_000, "batches_max": 1}

    stream = open_request(memoryview(_stream(rows)), what="x", **limits)

    (read,) = stream.batches()
    assert stream.schema.types == read.batch.schema.types == [plain, pa.int64()]
    assert read.batch.to_pydict() == rows.to_pydict()
    assert decode_payload(read.payload, stream.schema).equals(read.batch)


@pytest.mark.parametrize("is_nested", [False, True])
def test_views_of_more_bytes_than_a_batch_may_have_are_refused(is_nested: bool) -> None:
    # Many views of the same bytes: no text that long can be made of them.
    count, size = 5_000, 1 << 20
    views = np.zeros((count, 4), np.int32)
    views[:, 0] = size
    views[:, 1] = int.from_bytes(b"xxxx", "little")
    buffers = [None, pa.py_buffer(views), pa.py_buffer(b"x" * size)]
    column = pa.Array.from_buffers(pa.string_view(), count, buffers)
    if is_nested:
        column = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), column)
    body = _stream(pa.record_batch({"name": column}))
    stream = open_request(
        memoryview(body), what="x", rows_max=count, batch_bytes_max=2 * size, batches_max=1
    )

    with pytest.raises(RequestTooLargeError, match="has 5242880000 bytes of strings"):
        list(stream.batches())


def test_columns_that_cannot_be_moved_are_refused() -> None:
    column = pc.run_end_encode(pa.array(["a", "a", "b"]))

    with pytest.raises(InvalidRequestError, match=r"columns of type run_end_encoded.* send plain"):
        _decode(_stream(pa.record_batch({"id": [1, 2, 3], "name": column})))


def test_a_null_in_a_required_column_is_refused_even_when_the_stream_allows_it() -> None:
    loose = pa.record_batch({"id": pa.array([1, None], pa.int64()), "name": ["x", "y"]})

    with pytest.raises(SchemaMismatchError, match="column 'id' must not be null, but row 1 is"):
        _decode(_stream(loose))


def test_an_unknown_column_is_refused() -> None:
    with pytest.raises(UnknownColumnError, match="no column 'nam'"):
        _decode(_stream(pa.record_batch({"id": [1], "nam": ["x"]})))


def test_offsets_that_point_outside_the_body_are_refused() -> None:
    """Arrow trusts string offsets; unchecked they would read the service's own memory."""
    body = bytearray(encode_append_body(SCHEMA.to_arrow(), [(0, 1, ROWS)]))
    last_offset = struct.pack("<i", 20)
    at = body.rindex(last_offset)
    body[at : at + 4] = struct.pack("<i", 2_000_000_000)

    with pytest.raises(InvalidRequestError, match="unreadable batch"):
        _decode(bytes(body))


@pytest.mark.parametrize("count", [0, 1, 3, 20, 100])
def test_every_batch_of_an_answer_has_its_address_however_many_there_are(count: int) -> None:
    schema = SCHEMA.to_arrow()
    batches = [
        (BatchAddress(7, 10 * n, 10, 1_700_000_000_000_000 + n, n % 2), encode_payload(ROWS))
        for n in range(count)
    ]
    positions = {bucket: (bucket, 10 * count) for bucket in range(count)}

    pieces = encode_fetch_body(schema, batches, positions=positions)

    answer = decode_fetch_body(pa.py_buffer(b"".join(memoryview(p).cast("B") for p in pieces)))
    assert answer is not None
    assert [address for address, _ in answer.batches] == [address for address, _ in batches]
    assert all(rows.equals(ROWS, check_metadata=True) for _, rows in answer.batches)
    assert answer.positions == positions


def _annotated(metadata: dict[str, str]) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, ROWS.schema) as writer:
        writer.write_batch(ROWS, custom_metadata=metadata)
    return sink.getvalue()


def test_what_else_a_batch_says_of_itself_is_left_alone() -> None:
    others = {f"key {number}": "x" * number for number in range(98)}

    (part,) = _decode(_annotated({**others, "bucket": "7", "sequence": "9223372036854775807"}))

    assert (part.bucket, part.sequence) == (7, 9223372036854775807)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({f"key {number}": "" for number in range(101)}, "bad message at byte"),
        ({"bucket": "-1"}, "batch metadata 'bucket' must be a non-negative integer"),
        ({"sequence": "1" * 20}, "batch metadata 'sequence' must be a non-negative integer"),
        ({"bucket": ""}, "batch metadata 'bucket' must be a non-negative integer"),
    ],
)
def test_wrong_metadata_of_a_batch_is_refused(metadata: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        _decode(_annotated(metadata))


@pytest.mark.parametrize("body", [b"", b"x", b"\xff" * 64, b"PAR1" * 20, b"\x00" * 100])
def test_bytes_that_are_no_stream_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="not an Arrow IPC stream"):
        _decode(body)


def test_no_flipped_or_cut_byte_escapes_as_anything_but_our_errors() -> None:
    body = bytes(encode_append_body(SCHEMA.to_arrow(), [(2, 3, ROWS), (1, 1, ROWS)]))
    rng = random.Random(20261121)

    for _ in range(3_000):
        broken = bytearray(body[: rng.randrange(len(body))] if rng.random() < 0.3 else body)
        for _ in range(rng.randrange(1, 4)):
            if broken:
                broken[rng.randrange(len(broken))] = rng.randrange(256)
        try:
            parts = _decode(bytes(broken))
        except StreamhouseError:
            continue
        for part in parts:
            part.batch.validate(full=True)


def test_fetch_answers_follow_each_other_on_one_connection() -> None:
    address = BatchAddress(bucket=2, base_offset=40, row_count=10, timestamp_us=99, schema_id=0)
    payload = encode_payload(ROWS)
    answer = b"".join(
        bytes(piece)
        for piece in encode_fetch_body(
            SCHEMA.to_arrow(), [(address, payload)], positions={2: (0, 50)}
        )
    )
    heartbeat = b"".join(
        bytes(piece) for piece in encode_fetch_body(SCHEMA.to_arrow(), [], positions={2: (0, 50)})
    )
    source = pa.PythonFile(io.BytesIO(answer + heartbeat + answer), mode="r")

    bodies = [decode_fetch_body(source) for _ in range(4)]

    assert [None if b is None else len(b.batches) for b in bodies] == [1, 0, 1, None]
    assert bodies[0] is not None
    assert bodies[0].batches[0] == (address, ROWS)
    assert bodies[0].positions == {2: (0, 50)}


def test_projection_stores_only_the_named_columns_in_their_order() -> None:
    payload = memoryview(encode_payload(ROWS))
    schema = SCHEMA.select(["name"], table="a.b").to_arrow()

    projected = project_payload(payload, SCHEMA.to_arrow(), ["name"])

    assert decode_payload(memoryview(projected), schema) == ROWS.select(["name"])


def test_big_endian_batches_are_stored_as_all_others() -> None:
    schema = Schema.from_arrow(pa.schema([pa.field("id", pa.int64(), nullable=False)]))
    rows = pa.record_batch({"id": [1, 2, -3]}).cast(schema.to_arrow())
    body = memoryview(big_endian_stream(rows))
    for _ in range(2):
        stream = open_request(body, what="x", rows_max=9, batch_bytes_max=9_999, batches_max=1)
        (part,) = decode_append(stream, schema, table="a.b")

        assert part.batch == rows
        assert decode_payload(part.payload, schema.to_arrow()) == rows


def test_what_a_schema_says_of_its_byte_order_may_be_anything() -> None:
    random_ = random.Random(1)
    whole = big_endian_stream(ROWS.select(["id"]))
    for _ in range(2_000):
        body = bytearray(whole)
        for _ in range(random_.choice((1, 1, 3))):
            body[random_.randrange(len(body))] = random_.randrange(256)
        with contextlib.suppress(StreamhouseError):
            _decode(bytes(body))
