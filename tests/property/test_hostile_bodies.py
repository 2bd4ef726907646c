"""Binary bodies with flipped, cut, doubled and foreign bytes: refused, or stored as what they say.

Whatever a request held, the service goes on, and everything it stored can be read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TablePath
from streamhouse.core.wire import ipc_message
from streamhouse.core.wire.arrow_body import decode_fetch_body
from tests.support.asgi_call import AsgiAnswer
from tests.support.examples import examples
from tests.support.in_process_service import InProcessService, append_body, in_process_service

SCHEMA: Final = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("place", pa.struct([("x", pa.float64()), ("y", pa.decimal128(9, 2))])),
        pa.field("flag", pa.bool_()),
    ]
)
ROWS: Final = pa.RecordBatch.from_pylist(
    [
        {"id": i, "name": f"n{i}", "tags": ["a", None] * (i % 3), "place": {"x": i}, "flag": None}
        for i in range(20)
    ],
    schema=SCHEMA,
)
KEYS: Final = pa.schema([SCHEMA.field("id")])
BODIES: Final = {
    "append": append_body(SCHEMA, [(0, 0, ROWS), (None, 0, ROWS)]),
    "upsert": append_body(SCHEMA, [(None, 0, ROWS)]),
    "delete": append_body(KEYS, [(None, 0, ROWS.select(["id"]))]),
    "lookup": append_body(KEYS, [(None, 0, ROWS.select(["id"]))]),
    "prefix_lookup": append_body(KEYS, [(None, 0, ROWS.select(["id"]))]),
}


class World:
    """A log table `t` and a primary key table `k` in one service."""

    def __init__(self, data_dir: Path) -> None:
        self._runner = asyncio.Runner()
        self._opened = AsyncExitStack()
        self._service: InProcessService = self._runner.run(
            self._opened.enter_async_context(in_process_service(data_dir))
        )
        for path, key in (("t", ()), ("k", ("id",))):
            descriptor = TableDescriptor(
                path=TablePath.parse(path), schema=Schema.from_arrow(SCHEMA), primary_key=key
            )
            created = self.call("POST", "/v1/tables", json_body=descriptor.to_json())
            assert created.status == 201, created.body

    def call(self, method: str, path: str, **rest: Any) -> AsgiAnswer:
        return self._runner.run(self._service.call(method, path, **rest))

    def send(self, route: str, body: bytes) -> AsgiAnswer:
        table = "t" if route == "append" else "k"
        return self.call("POST", f"/v1/tables/{table}/{route}", body=body)

    def check_all_is_readable(self) -> None:
        for table in ("t", "k"):
            cut = self.call("GET", f"/v1/tables/{table}/state").json()
            state, table_id = cut["positions"]["0"], str(cut["table"]["table_id"])
            offset = state["log_start_offset"]
            while offset < state["high_watermark"]:
                query = {"offset": str(offset), "table_id": table_id}
                answer = self.call("GET", f"/v1/tables/{table}/buckets/0/fetch", query=query)
                assert answer.status == 200, answer.body
                fetched = decode_fetch_body(pa.BufferReader(answer.body))
                assert fetched is not None
                for address, batch in fetched.batches:
                    batch.validate(full=True)
                    offset = address.base_offset + address.row_count

    def close(self) -> None:
        self._runner.run(self._opened.aclose())
        self._runner.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    opened = World(tmp_path_factory.mktemp("bodies"))
    for route, body in BODIES.items():
        assert opened.send(route, body).status == 200
    yield opened
    opened.check_all_is_readable()
    opened.close()


@st.composite
def _broken(draw: st.DrawFn, body: bytes) -> bytes:
    """Some damage to a right body: what a broken client or a broken network sends."""
    broken = bytearray(body)
    for _ in range(draw(st.integers(1, 4))):
        if not broken:
            break
        at = draw(st.integers(0, len(broken) - 1))
        match draw(st.sampled_from(["flip", "cut", "insert", "double", "number", "drop"])):
            case "flip":
                broken[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del broken[at:]
            case "insert":
                broken[at:at] = draw(st.binary(min_size=1, max_size=64))
            case "double":
                broken[at:at] = broken[at : at + draw(st.integers(1, 256))]
            case "number":
                # Lengths, counts and offsets that lie.
                size = draw(st.sampled_from([4, 8]))
                value = draw(st.sampled_from([-1, 0, 1, 2**31 - 1, -(2**31), 2**24]))
                broken[at : at + size] = value.to_bytes(size, "little", signed=True)
            case "drop":
                del broken[at : at + draw(st.integers(1, 64))]
    return bytes(broken)


_SETTINGS: Final = settings(
    max_examples=examples(100),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@_SETTINGS
@given(st.data())
def test_a_broken_body_is_refused_or_harmless(world: World, data: st.DataObject) -> None:
    route = data.draw(st.sampled_from(sorted(BODIES)))

    answer = world.send(route, data.draw(_broken(BODIES[route])))

    if answer.status != 200:
        status, code, message = answer.error()
        assert status in (400, 404, 413), (code, message)


@_SETTINGS
@given(st.binary(max_size=2_000))
def test_any_bytes_are_refused(world: World, body: bytes) -> None:
    for route in BODIES:
        status, code, _ = world.send(route, body).error()
        assert (status, code) == (400, "invalid_request")


@_SETTINGS
@given(st.binary(max_size=512), st.booleans())
def test_the_walker_of_messages_raises_one_error_only(body: bytes, is_prefixed: bool) -> None:
    stream = b"\xff\xff\xff\xff" + body if is_prefixed else body
    try:
        for message in ipc_message.messages(memoryview(stream)):
            assert message.row_count >= 0
            assert len(message.data) <= len(stream)
    except InvalidRequestError:
        return


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("route", sorted(BODIES))
def test_a_body_cannot_expand(world: World, route: str, codec: str) -> None:
    """A megabyte of zeros in a few bytes: refused before anything is decompressed."""
    rows = pa.record_batch({"id": pa.nulls(1 << 17, pa.int64()).fill_null(0)}, schema=KEYS)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_stream(sink, KEYS, options=options) as writer:
        writer.write_batch(rows)
    body = sink.getvalue().to_pybytes()
    assert len(body) < rows.nbytes / 20

    status, _, message = world.send(route, body).error()

    assert status == 400
    assert "compressed record batches are not accepted" in message
