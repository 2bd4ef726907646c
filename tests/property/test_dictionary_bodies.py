"""Dictionary-encoded columns of a request are the values they stand for, and bombs are refused."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence
from random import Random
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.core.errors import InvalidRequestError, RequestTooLargeError
from streamhouse.core.wire.request_stream import open_request
from tests.support.examples import examples

BATCH_BYTES_MAX: Final = 1 << 20
VALUES: Final[Sequence[pa.Array]] = [
    pa.array(["", "ü", None, "long " * 9]),
    pa.array(["a", "b"], pa.large_string()),
    pa.array([b"\xff", b"", None]),
    pa.array([1, -5, None], pa.int32()),
    pa.array([1.5, float("inf")]),
    pa.array([True, False]),
    pa.array([1, 2], pa.timestamp("us", "UTC")),
    pa.array([1, 2], pa.date32()),
    pa.array([1, None], pa.decimal128(20, 2)),
    pa.nulls(2),
]


def _stream(batches: Sequence[pa.RecordBatch], **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    written = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_stream(sink, batches[0].schema, options=written) as writer:
        for batch in batches:
            writer.write_batch(batch)
    body: bytes = sink.getvalue().to_pybytes()
    return body


def _bits(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows with floats as integers: a NaN, which damage may make, equals nothing."""
    columns = [
        column.view(pa.int64()) if column.type == pa.float64() else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _read(body: bytes) -> pa.Table:
    stream = open_request(
        body,
        what="append to 't'",
        rows_max=1_000_000,
        batch_bytes_max=BATCH_BYTES_MAX,
        batches_max=100,
    )
    read = list(stream.batches())
    for part in read:
        # What is stored is the message of the plain rows.
        stored = pa.ipc.read_record_batch(pa.py_buffer(part.payload), stream.schema)
        assert _bits(stored).equals(_bits(part.batch))
    return pa.Table.from_batches([part.batch for part in read], schema=stream.schema)


def _encoded(random: Random, values: pa.Array, row_count: int) -> pa.DictionaryArray:
    indices = [
        None if random.random() < 0.2 else random.randrange(len(values)) for _ in range(row_count)
    ]
    kind = random.choice([pa.int8(), pa.int32(), pa.uint16()])
    return pa.DictionaryArray.from_arrays(pa.array(indices, kind), values)


def _body(random: Random) -> tuple[bytes, pa.Table]:
    values = random.sample(VALUES, 3)
    kinds = [pa.array([], pa.int8())] * 3
    batches = []
    for _ in range(random.randint(1, 3)):
        count = random.randint(0, 6)
        columns = []
        for at, known in enumerate(values):
            column = _encoded(random, known.take(pa.array(range(len(known)))[::-1]), count)
            if kinds[at].type == pa.int8():
                kinds[at] = column
            columns.append(column.cast(kinds[at].type))
        batches.append(
            pa.record_batch([pa.array(range(count), pa.int64()), *columns], names=list("idxy"))
        )
    table = pa.Table.from_batches(batches)
    plain = pa.schema(
        [("i", pa.int64()), *((n, v.type) for n, v in zip("dxy", values, strict=True))]
    )
    return _stream(batches), table.cast(plain)


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_rows_have_the_values_of_their_dictionaries(seed: int) -> None:
    body, plain = _body(Random(seed))

    assert _read(body).to_pylist() == plain.to_pylist()


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_damaged_dictionaries_are_read_or_refused_and_nothing_else(seed: int) -> None:
    random = Random(seed)
    damaged = bytearray(_body(random)[0])
    for _ in range(random.randint(1, 5)):
        damaged[random.randrange(len(damaged))] = random.choice(
            [0, 1, 0x7F, 0xFF, random.randrange(256)]
        )

    with contextlib.suppress(InvalidRequestError, RequestTooLargeError):
        _read(bytes(damaged))


@pytest.mark.parametrize("batch_count", [1, 60])
def test_rows_that_share_a_long_value_are_refused(batch_count: int) -> None:
    row_count = 20_000 // batch_count
    long = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(row_count, np.int8)), pa.array(["x" * 2_000])
    )
    body = _stream([pa.record_batch({"s": long})] * batch_count)
    assert len(body) < BATCH_BYTES_MAX

    with pytest.raises(RequestTooLargeError):
        _read(body)


def test_views_of_one_value_in_many_batches_are_refused() -> None:
    # Each says: 2000 letters, which begin with these, in the first buffer from its beginning on.
    view = struct.pack("<i4sii", 2_000, b"xxxx", 0, 0)
    buffers = [None, pa.py_buffer(view * 300), pa.py_buffer(b"x" * 2_000)]
    views = pa.Array.from_buffers(pa.string_view(), 300, buffers)
    body = _stream([pa.record_batch({"s": views})] * 60)

    with pytest.raises(RequestTooLargeError, match="send less at once"):
        _read(body)


TEXTS: Final = pa.array(["a", "b"]).dictionary_encode()


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        ([pa.record_batch({"s": TEXTS})], {"compression": "zstd"}, "compressed"),
        (
            [
                pa.record_batch({"s": TEXTS}),
                pa.record_batch({"s": pa.array(["a", "b", "c"]).dictionary_encode()}),
            ],
            {"emit_dictionary_deltas": True},
            "deltas",
        ),
        ([pa.record_batch({"s": pa.ListArray.from_arrays([0, 2], TEXTS)})], {}, "inside of others"),
        ([pa.record_batch({"s": pa.StructArray.from_arrays([TEXTS], ["x"])})], {}, "inside of"),
        (
            [
                pa.record_batch(
                    {"s": pa.DictionaryArray.from_arrays(pa.array([0]), pa.array([[1]]))}
                )
            ],
            {},
            "inside of others",
        ),
        (
            [
                pa.record_batch(
                    {
                        "s": pa.DictionaryArray.from_arrays(
                            pa.array([0, 7], pa.int8()), pa.array(["a"]), safe=False
                        )
                    }
                )
            ],
            {},
            "out of bounds",
        ),
    ],
)
def test_what_is_not_taken_is_said(
    batches: list[pa.RecordBatch], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        _read(_stream(batches, **options))
