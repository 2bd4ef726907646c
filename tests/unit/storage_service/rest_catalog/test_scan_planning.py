"""Scans that the service plans: pyiceberg finds the same files and rows as when it plans itself."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.conversions import from_bytes
from pyiceberg.table import Table
from pyiceberg.types import DecimalType, LongType, TimestamptzType

from streamhouse.lake._scan_request import _literal_of
from tests.support.key_table_world import KeyTableWorld
from tests.support.rest_world import RestWorld

_SCHEMA: Final = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("region", pa.string()),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("amount", pa.float64()),
        pa.field("price", pa.decimal128(9, 2)),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("local", pa.timestamp("us")),
        pa.field("raw", pa.binary()),
        pa.field("is_new", pa.bool_()),
    ]
)
_PATH: Final = "namespaces/db/tables/t/plan"
_DAYS: Final = [f"2026-01-{day:02d}" for day in range(1, 10)]


def _rows(start: int, end: int) -> list[dict[str, Any]]:
    rows = []
    for n in range(start, end):
        day = pa.scalar(_DAYS[n % 9]).cast(pa.date32()).as_py()
        at = pa.scalar(f"{_DAYS[n % 9]}T10:00:00").cast(pa.timestamp("us"))
        row = {
            "id": n,
            "region": None if n % 5 == 0 else f"r{n % 4}",
            "kind": "abc"[n % 3] + str(n),
            "amount": (n + start) / 2,
            "price": pa.scalar(f"{n}.25").cast(pa.decimal128(9, 2)).as_py(),
            "day": day,
            "at": at.cast(pa.timestamp("us", "UTC")).as_py(),
            "local": at.as_py(),
            "raw": bytes([n % 256]),
            "is_new": n % 2 == 0,
        }
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestWorld]:
    """A key table in three rounds, partitioned, with updated and deleted rows."""
    folder = tmp_path_factory.mktemp("planned")
    with KeyTableWorld(folder) as world, RestWorld(world.tiering, host="planned") as rest:
        world.create_key_table(
            _SCHEMA,
            bucket_count=2,
            partitioned_by=["day(at)", "truncate(1, kind)"],
            # pyiceberg itself plans every vector of a partition for each of its files.
            properties={"table.datalake.format-version": "2"},
        )
        for start in (0, 30, 20):
            world.upsert(*_rows(start, start + 30))
            world.tiering.tier()
        world.delete(*({"id": n} for n in (0, 7, 31)))
        world.tiering.tier()
        yield rest


def _tables(rest: RestWorld) -> tuple[Table, Table]:
    """The table with scans planned by the service, and planned by pyiceberg."""
    served = rest.client(**{"scan-planning-mode": "server"})
    return served.load_table("db.t"), rest.client().load_table("db.t")


_VALUES: Final = {
    "id": st.integers(-1, 70).map(str),
    "amount": st.integers(-2, 90).map(lambda n: str(n / 2)),
    "kind": st.sampled_from(["a3", "b", "c5", "d"]).map("'{}'".format),
    "region": st.sampled_from(["r0", "r1", "r3", "s", ""]).map("'{}'".format),
    "price": st.integers(0, 70).map("{}.25".format),
    "day": st.sampled_from(_DAYS).map("'{}'".format),
    "at": st.sampled_from(_DAYS).map("'{}T10:00:00+00:00'".format),
    "local": st.sampled_from(_DAYS).map("'{}T10:00:00'".format),
    "is_new": st.sampled_from(["true", "false"]),
}


@st.composite
def _predicates(draw: st.DrawFn) -> str:
    column = draw(st.sampled_from(sorted(_VALUES)))
    value = _VALUES[column]
    operators = ["=", "!=", "in", "not in", "is null", "is not null"]
    if column != "is_new":
        operators += ["<", "<=", ">", ">="]
    operator = draw(st.sampled_from(operators))
    if "null" in operator:
        return f"{column} {operator}"
    if "in" in operator:
        return f"{column} {operator} ({', '.join(draw(st.lists(value, min_size=2, max_size=4)))})"
    return f"{column} {operator} {draw(value)}"


_FILTERS: Final = st.recursive(
    _predicates(),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(
            lambda parts: f"({parts[0]}) {parts[1]} ({parts[2]})"
        ),
        inner.map(lambda text: f"not ({text})"),
    ),
    max_leaves=4,
)


def _files(table: Table, condition: str) -> list[tuple[Any, ...]]:
    return sorted(
        (
            task.file.file_path,
            task.file.record_count,
            task.file.spec_id,
            sorted(file.file_path for file in task.delete_files),
        )
        for task in table.scan(row_filter=condition).plan_files()
    )


def _ids(table: Table, condition: str) -> list[int]:
    rows = table.scan(row_filter=condition, selected_fields=("id",)).to_arrow()
    return sorted(rows["id"].to_pylist())


@given(condition=_FILTERS)
def test_the_service_finds_the_files_and_rows_that_pyiceberg_finds(
    rest: RestWorld, condition: str
) -> None:
    served, local = _tables(rest)
    assert _files(served, condition) == _files(local, condition)
    assert _ids(served, condition) == _ids(local, condition)
    counts = [table.scan(row_filter=condition).count() for table in (served, local)]
    assert counts[0] == counts[1]


def test_a_snapshot_of_the_past(rest: RestWorld) -> None:
    served, local = _tables(rest)
    for snapshot in local.snapshots():
        scans = [t.scan(snapshot_id=snapshot.snapshot_id).to_arrow() for t in (served, local)]
        assert sorted(scans[0]["id"].to_pylist()) == sorted(scans[1]["id"].to_pylist())


def test_a_snapshot_with_columns_renamed_and_made_anew_later(rest: RestWorld) -> None:
    local = rest.client().create_table(
        "db.foreign", pa.schema([("a", pa.int64()), ("b", pa.int64())])
    )
    local.append(pa.table({"a": [1, 2], "b": [10, 20]}))
    first = local.metadata.current_snapshot_id
    with local.update_schema() as update:
        update.rename_column("a", "c").delete_column("b")
    with local.update_schema() as update:
        update.add_column("b", LongType())
    local.append(pa.table({"c": [3], "b": [30]}))
    served = rest.client(**{"scan-planning-mode": "server"}).load_table("db.foreign")
    for condition, selected, snapshot_id in [
        ("c >= 2", ("c", "b"), None),
        ("b = 30", ("*",), None),
        ("b is null", ("c",), None),
        ("c = 2", ("a", "b"), first),
    ]:
        rows = [
            table.scan(condition, selected, snapshot_id=snapshot_id).to_arrow().to_pylist()
            for table in (served, local)
        ]
        assert rows[0] == rows[1]
        assert rows[0]
    for name, is_of_snapshot, count in (("b", True, 1), ("a", False, 0), ("c", False, 0)):
        body = {
            "snapshot-id": first,
            "use-snapshot-schema": is_of_snapshot,
            "filter": {"type": "eq", "term": name, "value": 30},
        }
        status, answer = rest.call("POST", "namespaces/db/tables/foreign/plan", body)
        assert (status, len(answer["file-scan-tasks"])) == (200, count)


def test_partitions_statistics_and_names_without_case(rest: RestWorld) -> None:
    body = {
        "filter": {"type": "eq", "term": "ID", "value": 40},
        "select": ["Id"],
        "case-sensitive": False,
        "stats-fields": ["id", "at", "price", "raw"],
    }
    status, answer = rest.call("POST", _PATH, body)
    assert (status, answer["status"]) == (200, "completed")
    for task in answer["file-scan-tasks"]:
        assert task["residual-filter"] == body["filter"]
        day, kind, bucket = task["data-file"]["partition"]
        assert day.startswith("2026-01-0")
        assert kind in ("a", "b", "c")
        assert bucket in (0, 1)
        both = [task["data-file"][f"{side}-bounds"] for side in ("lower", "upper")]
        # In the binary form of manifests, as Iceberg Java reads them.
        low, high = (
            dict(zip(bounds["keys"], map(bytes.fromhex, bounds["values"]), strict=True))
            for bounds in both
        )
        id_, price, at, raw = sorted(low)
        assert from_bytes(LongType(), low[id_]) <= 40 <= from_bytes(LongType(), high[id_])
        assert str(from_bytes(DecimalType(9, 2), low[price])).endswith(".25")
        assert from_bytes(TimestamptzType(), low[at]) <= from_bytes(TimestamptzType(), high[at])
        assert low[raw] <= high[raw]
    assert rest.call("POST", _PATH, {**body, "case-sensitive": True})[0] == 400


@pytest.mark.parametrize(
    "condition",
    [
        {"type": "eq", "term": {"type": "transform", "transform": "bucket[4]", "term": "id"}},
        {"type": "not", "child": {"type": "eq", "term": {"type": "transform", "term": "id"}}},
    ],
)
def test_a_condition_that_cannot_be_judged_leaves_all_files(
    rest: RestWorld, condition: dict[str, Any]
) -> None:
    _, everything = rest.call("POST", _PATH, {})
    _, answer = rest.call("POST", _PATH, {"filter": condition})
    paths = [
        sorted(task["data-file"]["file-path"] for task in plan["file-scan-tasks"])
        for plan in (everything, answer)
    ]
    assert paths[0] == paths[1]
    assert answer["file-scan-tasks"][0]["residual-filter"] == condition


@pytest.mark.parametrize(
    ("condition", "has_files"),
    [
        ({"type": "eq", "term": "id", "value": 1 << 80}, False),
        ({"type": "gt", "term": "id", "value": 1 << 80}, False),
        ({"type": "lt", "term": "id", "value": 1 << 80}, True),
        ({"type": "gt-eq", "term": "id", "value": -(1 << 80)}, True),
        ({"type": "not-eq", "term": "id", "value": 1 << 80}, True),
        ({"type": "in", "term": "id", "values": [1, 1 << 80]}, True),
        ({"type": "not-in", "term": "id", "values": [1 << 80, 1 << 81]}, True),
        ({"type": "in", "term": "id", "values": []}, False),
        ({"type": "not-in", "term": "id", "values": []}, True),
        ({"type": "gt", "term": "price", "value": "1.234"}, True),
        ({"type": "lt", "term": "amount", "value": 1e300}, True),
        ({"type": "lt", "term": {"type": "reference", "term": "id"}, "value": 5}, True),
        ({"type": "is-nan", "term": "id"}, False),
        ({"type": "not-nan", "term": "id"}, True),
        (False, False),
        ({"type": "true"}, True),
    ],
)
def test_values_at_the_edge_of_a_type(rest: RestWorld, condition: Any, has_files: bool) -> None:
    status, answer = rest.call("POST", _PATH, {"filter": condition})
    assert (status, bool(answer.get("file-scan-tasks"))) == (200, has_files), answer


def _nested(depth: int) -> Any:
    value: Any = True
    for _ in range(depth):
        value = {"type": "not", "child": value}
    return value


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"snapshot-id": "1"}, 400, "snapshot-id must be of JSON type integer"),
        ({"snapshot-id": 1}, 404, "has no snapshot 1"),
        ({"select": ["nothing"]}, 400, "column 'nothing' does not exist"),
        ({"select": [1]}, 400, "select must be a list of column names"),
        ({"case-sensitive": 1}, 400, "case-sensitive must be of JSON type boolean"),
        ({"start-snapshot-id": 1, "end-snapshot-id": 2}, 404, "has no snapshot 2"),
        ({"start-snapshot-id": 1}, 400, "needs both start-snapshot-id and end-snapshot-id"),
        ({"end-snapshot-id": 2}, 400, "needs both start-snapshot-id and end-snapshot-id"),
        (
            {"start-snapshot-id": 1, "end-snapshot-id": 2, "snapshot-id": 3},
            400,
            "must not stand beside",
        ),
        ({"filter": []}, 400, "must be an object, true or false"),
        ({"filter": {"type": "eq", "term": "id", "value": "x"}}, 400, "is not a value of column"),
        ({"filter": {"type": "eq", "term": "day", "value": "x"}}, 400, "is not a value of column"),
        ({"filter": {"type": "eq", "term": "day", "value": 1.5}}, 400, "is not a value of column"),
        ({"filter": {"type": "eq", "term": "raw", "value": "xyz"}}, 400, "is not a value of"),
        ({"filter": {"type": "eq", "term": "day", "value": 1 << 31}}, 400, "is not a value of"),
        ({"filter": {"type": "starts-with", "term": "id", "value": "x"}}, 400, "needs a string"),
        ({"filter": {"type": "in", "term": "id", "values": [1] * 10_001}}, 400, "at most 10000"),
        ({"filter": {"type": "like", "term": "id"}}, 400, "unknown expression type 'like'"),
        ({"filter": _nested(101)}, 400, "nested deeper than 100 levels"),
        ({"filter": {"type": "eq", "term": "amount", "value": math.nan}}, 400, "not in JSON"),
        ({"filter": {"type": "eq", "term": "amount", "value": math.inf}}, 400, "not in JSON"),
        ({"filter": {"type": "eq", "term": "kind", "value": "x" * 2**20}}, 400, "at most 1048576"),
        ({"filter": {"type": "eq", "term": {"type": []}, "value": 1}}, 400, "does not exist"),
        ({"filter": {"type": "eq", "term": "id", "value": {"value": {}}}}, 400, "is not a value"),
        ({"filter": {"type": "eq", "term": "id"}}, 400, "is not a value of column"),
        ({"filter": {"type": "in", "term": "id", "values": {"1": 1}}}, 400, "must be a list"),
        ({"filter": {"type": "in", "term": "id", "values": [[1]]}}, 400, "is not a value of"),
        ({"filter": {"type": "and", "left": True}}, 400, "must be an object, true or false"),
        ({"filter": {"type": ["eq"], "term": "id"}}, 400, "unknown expression type"),
        ({"filter": {"type": "eq", "term": "\ud800", "value": 1}}, 400, "does not exist"),
        ({"stats-fields": ["nothing"]}, 400, "column 'nothing' does not exist"),
        ({"stats-fields": "id"}, 400, "stats-fields must be of JSON type array"),
        ({"snapshot-id": True}, 400, "snapshot-id must be of JSON type integer"),
    ],
)
def test_what_is_wrong_is_said(
    rest: RestWorld, body: dict[str, Any], status: int, message: str
) -> None:
    answered, answer = rest.call("POST", _PATH, body)
    assert answered == status, answer
    assert message in answer["error"]["message"]


def test_no_plan_is_kept(rest: RestWorld) -> None:
    for method in ("GET", "DELETE"):
        status, answer = rest.call(method, f"{_PATH}/1")
        assert status == 404
        assert "there is no such plan" in answer["error"]["message"]
    assert rest.call("POST", "namespaces/db/tables/nothing/plan", {})[0] == 404


def test_a_condition_of_very_many_parts_leaves_all_files(rest: RestWorld) -> None:
    parts: list[Any] = [{"type": "eq", "term": "id", "value": -n} for n in range(1, 1_025)]
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [{"type": "or", "left": left, "right": right} for left, right in pairs]
    _, everything = rest.call("POST", _PATH, {})
    _, answer = rest.call("POST", _PATH, {"filter": parts[0]})
    assert len(answer["file-scan-tasks"]) == len(everything["file-scan-tasks"])
    assert answer["file-scan-tasks"][0]["residual-filter"] == parts[0]
    assert not rest.call("POST", _PATH, {"filter": parts[0]["left"]["left"]})[1]["file-scan-tasks"]


def test_a_decimal_of_more_digits_than_python_keeps_is_exact() -> None:
    value = "123456789012345678901234567890123456.78"
    assert _literal_of(value, DecimalType(38, 2)).value == Decimal(value)


_SCALARS: Final = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from([*_VALUES, "raw", "2026-01-01", "1e999999", "and", "in", "NaN", "\ud800"]),
)
_ANY_JSON: Final = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.fixed_dictionaries(
            {"type": st.sampled_from(["eq", "in", "and", "not", "lt", "starts-with", "is-nan", 1])},
            optional={
                key: st.one_of(inner, st.sampled_from([*_VALUES, "raw"]))
                for key in ("term", "value", "values", "left", "right", "child", "transform")
            },
        ),
    ),
    max_leaves=6,
)
_FIELDS: Final = (
    *("filter", "select", "stats-fields", "snapshot-id", "start-snapshot-id", "end-snapshot-id"),
    *("case-sensitive", "use-snapshot-schema", "min-rows-requested"),
)


@given(
    body=st.one_of(
        st.fixed_dictionaries({}, optional={"filter": _ANY_JSON, "case-sensitive": st.booleans()}),
        st.dictionaries(st.sampled_from(_FIELDS), _ANY_JSON, max_size=3),
        _ANY_JSON,
    )
)
def test_any_body_is_planned_or_refused_in_a_sentence(rest: RestWorld, body: Any) -> None:
    status, answer = rest.call("POST", _PATH, body)
    assert status in (200, 400, 404), answer
    if status == 200:
        json.dumps(answer, allow_nan=False)
    else:
        assert "Traceback" not in answer["error"]["message"]
        assert len(answer["error"]["message"]) < 1_000
