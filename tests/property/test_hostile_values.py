"""Values at the edges of what formats can say: every one is refused in a sentence, none is a bug.

Names that are no text, types nested by hundreds, JSON nested by thousands, numbers that no machine
has, and lists of a hundred thousand. No answer is a 500, and no traceback is in the log.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest

from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TablePath
from tests.support.asgi_call import AsgiAnswer
from tests.support.in_process_service import InProcessService, append_body, in_process_service

ID: Final = pa.field("id", pa.int64(), nullable=False)
NAME: Final = pa.field("name", pa.string(), nullable=False)
NESTED: Final = pa.field("s", pa.struct([("x", pa.list_(pa.int64()))]))
SCHEMA: Final = pa.schema([ID, NAME, NESTED])
ARROW: Final = {"content-type": "application/vnd.apache.arrow.stream"}
JSON: Final = {"content-type": "application/json"}
ROUTES: Final = ("t/append", "k/upsert", "k/delete", "k/lookup", "k/prefix_lookup")
DEEP: Final = "[" * 20_000
NUMBER: Final = "9" * 5_000


class World:
    """A log table `t` and a primary key table `k`, whose key is `id` and `name`."""

    def __init__(self, data_dir: Path) -> None:
        self._runner = asyncio.Runner()
        self._opened = AsyncExitStack()
        self.service: InProcessService = self._runner.run(
            self._opened.enter_async_context(in_process_service(data_dir, fetch_wait_ms_max=1))
        )
        for path, key in (("t", ()), ("k", ("id", "name"))):
            descriptor = TableDescriptor(
                path=TablePath.parse(path),
                schema=Schema.from_arrow(SCHEMA),
                primary_key=key,
                bucket_count=3,
            )
            assert self.call("POST", "/v1/tables", json_body=descriptor.to_json()).status == 201

    def call(self, method: str, path: str, **rest: Any) -> AsgiAnswer:
        return self._runner.run(self.service.call(method, path, **rest))

    def send(self, route: str, body: bytes, **query: str) -> AsgiAnswer:
        return self.call("POST", f"/v1/tables/{route}", body=body, headers=ARROW, query=query)

    def close(self) -> None:
        self._runner.run(self._opened.aclose())
        self._runner.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    opened = World(tmp_path_factory.mktemp("values"))
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def no_bug_in_the_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.ERROR):
        yield
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def _is_a_good_answer(answer: AsgiAnswer, of: object) -> None:
    assert answer.is_complete
    if answer.status >= 400:
        error = answer.json()["error"]
        assert answer.status < 500 or error.get("retriable") or answer.status == 501, (of, error)
        assert error["message"]
        assert "Error:" not in error["message"], (of, error)
        assert len(answer.body) < 10_000, of


def _nested(depth: int, kind: str) -> pa.DataType:
    t: pa.DataType = pa.int64()
    for _ in range(depth):
        t = pa.list_(t) if kind == "list" else pa.struct([("x", t)])
    return t


def _body(*fields: pa.Field, rows: int = 1, has_keys: bool = False) -> bytes:
    """Return a request of rows of nulls, or of none where Arrow itself cannot write them.

    With `has_keys` the columns `ID` and `NAME` have values.
    """
    schema = pa.schema([field.with_nullable(True) for field in fields])
    keys = {ID: pa.array(range(rows)), NAME: pa.array(["a"] * rows)} if has_keys else {}
    arrays = [keys.get(field, pa.nulls(rows, field.type)) for field in fields]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    try:
        return append_body(schema, [(None, 0, batch)])
    except pa.ArrowInvalid:
        return append_body(schema, [])


_UNREADABLE: Final = "QQQQ"
_WITH_TEXTS: Final = {
    "column": [pa.field(_UNREADABLE, pa.int64())],
    "struct": [ID, pa.field("s", pa.struct([(_UNREADABLE, pa.int64())]))],
    "struct in a list": [ID, pa.field("s", pa.list_(pa.struct([(_UNREADABLE, pa.int64())])))],
    "list": [ID, pa.field("s", pa.list_(pa.field(_UNREADABLE, pa.int64())))],
    "time zone": [pa.field("id", pa.timestamp("us", tz=_UNREADABLE)), NAME, NESTED],
    "time zone in a list": [ID, pa.field("s", pa.list_(pa.timestamp("us", tz=_UNREADABLE)))],
}


@pytest.mark.parametrize("route", ROUTES)
def test_names_that_are_no_text_are_refused_wherever_they_are(world: World, route: str) -> None:
    for where, fields in _WITH_TEXTS.items():
        body = _body(*fields).replace(_UNREADABLE.encode(), b"\xff\xfe\x80\xc0")

        status, code, message = world.send(route, body).error()

        assert (status, code) == (400, "invalid_request"), (where, message)
        assert "unreadable schema: 'utf-8' codec can't decode" in message


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", ["list", "struct"])
def test_types_nested_deep_are_refused(world: World, route: str, kind: str) -> None:
    for depth in (1, 40, 63, 64, 99, 100, 101, 500, 900):
        body = _body(ID, NAME, pa.field("s", _nested(depth, kind)))

        answer = world.send(route, body)

        _is_a_good_answer(answer, (route, depth))
        if depth > 100:
            assert answer.status == 400
        if depth == 101:
            assert "nested more than 100 deep" in answer.error()[2]


_TYPES: Final = (
    pa.string(), pa.null(), pa.uint64(), pa.float16(), pa.float64(), pa.decimal256(70, 3),
    pa.month_day_nano_interval(), pa.dictionary(pa.int8(), pa.int64()), pa.duration("s"),
    pa.run_end_encoded(pa.int32(), pa.int64()), pa.sparse_union([pa.field("a", pa.int64())]),
    pa.string_view(), pa.list_view(pa.int64()), pa.uuid(), pa.struct([]), pa.time64("ns"),
    pa.list_(pa.int64(), 3), pa.timestamp("ns", tz="UTC"), pa.date64(), pa.large_string(),
)  # fmt: skip
_COLUMNS: Final = (
    [], [ID], [ID, ID], [NAME], [NAME, ID], [ID, NAME, NESTED], [NESTED], [ID, NAME, NAME],
    [pa.field("", pa.int64())], [pa.field("id\0", pa.int64())], [pa.field("y" * 5_000, pa.int64())],
    [pa.field(f"c{i}", pa.int8()) for i in range(2_101)],
)  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
def test_any_columns_of_any_type_with_any_number_of_rows(world: World, route: str) -> None:
    columns = [list(fields) for fields in _COLUMNS]
    columns += [[pa.field("id", t), NAME, NESTED] for t in _TYPES]
    columns += [[ID, NAME, pa.field("s", t)] for t in _TYPES]
    columns += [[pa.field("id", t)] for t in _TYPES]
    bodies = [_body(*fields, rows=rows) for fields in columns for rows in (0, 1, 3)]
    # Those with keys go to several buckets.
    bodies += [_body(*fields, rows=rows, has_keys=True) for fields in columns for rows in (3, 100)]
    bodies += [append_body(pa.schema(fields), []) for fields in columns]
    # A batch without columns has rows all the same.
    only_rows = pa.StructArray.from_buffers(pa.struct([]), 5, [None])
    empty = pa.RecordBatch.from_struct_array(only_rows)
    bodies.append(append_body(empty.schema, [(None, 0, empty)]))
    for body in bodies:
        _is_a_good_answer(world.send(route, body), (route, body[:400]))


@pytest.mark.parametrize("route", ROUTES)
def test_what_batches_say_of_themselves(world: World, route: str) -> None:
    rows = pa.RecordBatch.from_pylist([{"id": 1, "name": "a"}], schema=SCHEMA)
    numbers = ("", "-1", "0", "\u0663", "9" * 18, "9" * 19, "9" * 5_000, str(1 << 63))
    for bucket, sequence, writer in itertools.product(numbers, (None, *numbers), (None, "f" * 16)):
        metadata = {"bucket": bucket} | ({} if sequence is None else {"sequence": sequence})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as stream:
            stream.write_batch(rows, custom_metadata=metadata)
        query = {} if writer is None else {"writer_id": writer}
        answer = world.send(route, sink.getvalue().to_pybytes(), **query)
        _is_a_good_answer(answer, (route, metadata))


_TEXTS: Final = (
    DEEP, '{"0":' + DEEP, '{"0":1e400}', '{"0":NaN}', f'{{"0":{NUMBER}}}', f'{{"{NUMBER}":1}}',
    '{"0":1.5}', '{"-0":999999}', '{"1_0":0}', '{"0":null}', '{"0":18446744073709551616}',
    '{"9223372036854775808":0}', "[]", "[[]]", '["\\ud800"]', f"[{NUMBER}]", "null", "", ",",
    "id,id", "\0", "-1", "1e3", "\u0663", NUMBER, "9" * 19,
)  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "names"),
    [
        ("GET", "t/subscribe", ("start", "columns", "schema_id", "table_id")),
        ("GET", "t/buckets/0/fetch",
         ("offset", "columns", "schema_id", "max_bytes", "max_wait_ms", "end_offset",
          "table_id")),
        ("GET", "t/state", ("after", "max_wait_ms", "table_id")),
        ("GET", "t/offsets", ("timestamp_us", "table_id")),
        ("POST", "k/upsert", ("columns", "writer_id")),
        ("POST", "k/lookup", ("columns",)),
        ("POST", "k/prefix_lookup", ("columns", "limit")),
        ("POST", "t/transactions/x/stage", ("token",)),
    ],
)  # fmt: skip
def test_any_text_as_any_parameter(
    world: World, method: str, path: str, names: tuple[str, ...]
) -> None:
    rows = pa.RecordBatch.from_pylist([{"id": 1, "name": "a"}], schema=pa.schema([ID, NAME]))
    body = append_body(rows.schema, [(None, 0, rows)]) if method == "POST" else b""
    for name, text in itertools.product(names, _TEXTS):
        query = {"offset": "0"} if path.endswith("fetch") else {}
        if path.endswith("subscribe"):
            # Or it would go on for ever.
            query["start"] = "never"
        if path.endswith("state"):
            query["max_wait_ms"] = "1"
        url = f"/v1/tables/{path}"
        answer = world.call(method, url, query={**query, name: text}, body=body, headers=ARROW)
        _is_a_good_answer(answer, (path, name, text[:50]))


_BODIES: Final = (
    DEEP.encode(), b'{"a":' * 20_000, b'{"a":' * 900 + b"1" + b"}" * 900, b"[" * 400 + b"]" * 400,
    b'{"x":' * 400 + b"1" + b"}" * 400, NUMBER.encode(), b'{"name":%s}' % NUMBER.encode(),
    b"NaN", b"1e400", b"\xff\xfe", b"\xef\xbb\xbf{}", b"\0", b"", b"null", b'"\\ud800"',
    b'{"\\ud800":1}', b'{"name":"a\\u0000b"}', b"{}",
)  # fmt: skip


def test_any_body_at_any_control_route(world: World) -> None:
    paths = world.call("GET", "/openapi.json").json()["paths"]
    for path, methods in paths.items():
        url = path.replace("{path}", "t").replace("{", "").replace("}", "")
        for method, body in itertools.product(methods.keys() - {"get", "delete"}, _BODIES):
            answer = world.call(method.upper(), url, body=body, headers=JSON)
            _is_a_good_answer(answer, (method, path, body[:40]))


@pytest.mark.parametrize(
    "path",
    [
        "namespaces", "namespaces/default", "namespaces/default/tables",
        "namespaces/default/tables/t", "namespaces/default/tables/t/metrics",
        "namespaces/default/properties", "namespaces/default/register", "transactions/commit",
        "tables/rename",
    ],
)  # fmt: skip
def test_any_body_at_the_rest_catalog(world: World, path: str) -> None:
    for body in _BODIES:
        answer = world.call("POST", f"/iceberg/v1/{path}", body=body, headers=JSON)
        _is_a_good_answer(answer, (path, body[:40]))


def _type_json(depth: int, kind: str) -> Any:
    value: Any = "int"
    for _ in range(depth):
        value = {
            "array": {"type": "array", "element": value},
            "map": {"type": "map", "key": "int", "value": value},
            "struct": {"type": "struct", "fields": [{"name": "x", "type": value}]},
        }[kind]
    return value


@pytest.mark.parametrize("kind", ["array", "map", "struct"])
def test_a_table_that_can_be_made_can_be_described_and_written(world: World, kind: str) -> None:
    """Deeper types could be made once, and then nobody could describe them or send a row."""
    made = 0
    for depth in (16, 17, 32, 33, 64, 101, 300):
        column = {"name": "a", "type": _type_json(depth, kind)}
        answer = world.call("POST", "/v1/tables", json_body={"path": "n", "schema": [column]})
        _is_a_good_answer(answer, (kind, depth))
        if answer.status == 201:
            made += 1
            described = world.call("GET", "/v1/tables/n").json()
            schema = Schema.from_json(described["schema"]).to_arrow()
            assert world.send("n/append", _body(*schema)).status == 200
            assert world.call("DELETE", "/v1/tables/n").status == 204
        else:
            assert answer.error()[1] == "invalid_schema"
        change = {"changes": [{"add": f"{kind}{depth}", "type": _type_json(depth, kind)}]}
        altered = world.call("PATCH", "/v1/tables/k/schema", json_body=change)
        _is_a_good_answer(altered, (kind, depth))
        assert (altered.status == 200) == (answer.status == 201)
    assert made == (1 if kind == "map" else 3)


_COLUMN: Final = {"name": "a", "type": "int"}
_DESCRIPTORS: Final[list[dict[str, Any]]] = [
    {"schema": 5}, {"schema": [5]}, {"path": 5}, {"path": ["x"]}, {"path": "x\0"},
    *({"schema": [{**_COLUMN, "id": value}]} for value in ("x", None, 1e400, 2**70, -5, True)),
    *({"schema": [{"name": "a", "type": {"type": "struct", "fields": value}}]}
      for value in (5, [5], {"x": 1}, [{"name": "\0", "type": "int"}])),
    *({"schema": [{"name": "a", "type": value}]}
      for value in ("decimal(99999999999999999999,1)", "decimal(-1,1)", "x" * 300_000,
                    {"a": "y" * 300_000}, f"decimal({NUMBER},1)", None, 5)),
    {"schema": [{"name": "a" * 300_000, "type": "int"}]},
    {"schema": [{**_COLUMN, "comment": "c" * 300_000}]},
    {"schema": [{**_COLUMN, "comment": ["c"]}]},
    {"schema": [{"name": "a", "type": {"type": "struct", "fields": [
        {"name": f"f{i}", "type": "int"} for i in range(10_001)]}}]},
    *({"primary_key": value} for value in (5, None, {"a": 1}, "a", [5], ["x" * 300_000])),
    *({"bucket_count": value} for value in (2**70, 1e400, -1, None)),
    *({"partitioned_by": [value]}
      for value in (f"bucket({NUMBER}, a)", "bucket(99999999999, a)", "(" * 10_000, "\0")),
    *({"properties": {name: value}}
      for name in ("table.log.ttl", "table.datalake.freshness", "table.log.segment-bytes",
                   "table.datalake.snapshot.min-count", "table.datalake.batch-layout.sort")
      for value in (NUMBER, NUMBER + "d", "9" * 30, "9" * 18 + "d", "\u0663", "\u00b2", "", None)),
    {"properties": {"x" * 300_000: "1"}}, {"properties": [1]}, {"y" * 300_000: 1},
]  # fmt: skip


def test_any_value_in_a_description_of_a_table(world: World) -> None:
    for fields in _DESCRIPTORS:
        body = {"path": "d", "schema": [_COLUMN], **fields}
        _is_a_good_answer(world.call("POST", "/v1/tables", json_body=body), str(fields)[:100])
        # What was made of it does not break what looks at all tables.
        assert world.call("GET", "/metrics").status == 200
        assert world.call("GET", "/v1/status").status == 200
        world.call("DELETE", "/v1/tables/d")


_CALLS: Final[list[tuple[str, str, dict[str, Any]]]] = [
    *(("PATCH", "tables/k/schema", {"changes": value}) for value in (
        [{"add": "x"}], [{"add": 5}], [{"add": "x", "type": 5}], [{}],
        [{"add": "y" * 300, "type": "int"}], [{"add": "z", "type": "int", "after": 5}],
        [{"rename": "name", "to": 5}], [{"drop": "name", "confirm": 5}],
        [{"widen": "id", "to": None}], [{"comment": "name", "to": "c" * 300_000}],
        [{"q" * 100_000: 1}], [{"drop": "q" * 100_000}], [5] * 100_000)),
    *(("POST", "tiering/complete", {
        "table": "t", "table_id": 1, "epoch": 1, "lake_snapshot_id": "1", "lake_table_uuid": "x",
        "tiered_offsets": {"0": 0}, **value}) for value in (
        {"table_id": 2**70}, {"epoch": 2**70}, {"tiered_offsets": {"0": 2**70}},
        {"tiered_offsets": {str(2**70): 1}}, {"tiered_offsets": {"-1": 1}},
        {"lake_snapshot_id": "9" * 19}, {"maintenance_due_us": 2**70},
        {"tiered_offsets": {str(i): 0 for i in range(100_000)}},
        {"tiered_offsets": {str(i): "q" for i in range(100_000)}},
        {"debt": {"data_files": 2**70, "delete_files": 0, "snapshots": 0}})),
    *(("PUT", "tables/t/lake/pins/a", {"snapshot_id": "1", "ttl_ms": 1_000, **value}) for value in (
        {"ttl_ms": 2**70}, {"ttl_ms": -1}, {"snapshot_id": "9" * 19}, {"snapshot_id": 2**70})),
    *(("POST", "tables/k/transactions", {"operation": "upsert", **value}) for value in (
        {"timeout_ms": 2**70}, {"timeout_ms": -1}, {"columns": ["id"] * 100_000}, {"columns": []},
        {"app_id": "\0", "version": 2**63 - 1}, {"version": 1})),
    ("POST", "tables/t/transactions/x/commit", {"parts": ["x"] * 300_000}),
    ("POST", "tables/t/transactions/x/commit", {"parts": [5] * 300_000}),
    ("POST", "databases", {f"k{i}": 5 for i in range(100_000)}),
    ("PATCH", "tables/t/properties", {"set": {f"k{i}": "v" for i in range(100_000)}}),
    ("PATCH", "tables/t/properties", {"set": {f"k{i}": 5 for i in range(100_000)}}),
    ("PATCH", "tables/t/properties", {"remove": [f"k{i}" for i in range(100_000)]}),
    ("PATCH", "tables/t/properties", {"set": {"table.import.source": "x" * 1_000_000}}),
    ("PUT", "tables/t/partitioning", {"partitioned_by": ["x" * 300_000]}),
    *(("POST", "tiering/claim", {"worker_id": "w", "tables": value}) for value in (
        ["t"] * 80_000, [str(i) for i in range(80_000)], [5] * 80_000, ["x" * 300_000])),
    ("POST", "tiering/fail", {"table": "t", "table_id": 1, "epoch": 2**70, "error": "x" * 10_000}),
]  # fmt: skip


def test_any_value_in_a_control_request(world: World) -> None:
    for method, path, body in _CALLS:
        answer = world.call(method, f"/v1/{path}", json_body=body)
        _is_a_good_answer(answer, (path, json.dumps(body)[:100]))
        assert answer.status >= 400 or len(json.dumps(body)) < 10_000, (path, str(body)[:100])


_SEGMENTS: Final = (
    "x" * 50_000, NUMBER, "-1", "1.5", "\u0663", "nan", "1e400", "%ff", "a\0b", "%", "", ".", "..",
    "\u00ed\u00a0\u0080",
)  # fmt: skip


def test_any_text_in_a_path(world: World) -> None:
    paths = (
        "/v1/tables/k/rows/{}", "/v1/tables/k/rows/{}/{}", "/v1/tables/{}/rows/1", "/v1/tables/{}",
        "/v1/tables/t/buckets/{}/fetch", "/v1/tables/t/transactions/{}", "/v1/databases/{}",
        "/v1/tables/t/lake/pins/{}", "/iceberg/v1/namespaces/{}", "/{}",
        "/iceberg/v1/namespaces/{}/tables/{}", "/iceberg/v1/namespaces/default/tables/{}",
    )  # fmt: skip
    for path, segment, method in itertools.product(
        paths, _SEGMENTS, ("GET", "DELETE", "PUT", "HEAD", "POST", "OPTIONS")
    ):
        url = path.format(*[segment] * path.count("{}"))
        query = {"offset": "0"} if "fetch" in path else {}
        answer = world.call(method, url, query=query, body=b"{}", headers=JSON)
        if method != "HEAD":
            _is_a_good_answer(answer, (method, url[:60]))
