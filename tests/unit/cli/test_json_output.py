"""What `top`, `shards` and `consumers` print of a service's answers, for people and programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from streamhouse.cli import cli
from streamhouse.core.errors import UnavailableError
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.offsets import BucketPositions
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.core.model.table_state import TableState
from tests.support.canned_service import canned_service
from tests.support.documented_fields import documented

SHARD = {
    "shard": "0",
    "endpoint": "http://127.0.0.1:1",
    "epoch": 3,
    "is_live": True,
    "load_millicores": 1500,
    "table_count": 7,
    "journal": None,
}
CONSUMER = {
    "name": "reader",
    "lag_rows": 12,
    "lag_ms": None,
    "rows_at_risk": 0,
    "reported_us": 1_700_000_000_000_000,
}


def _table(name: str, *, rows: int, lag_ms: int, written: float = 0.0) -> dict[str, Any]:
    return {
        "table": name,
        "row_count": rows,
        "log_bytes": rows * 100,
        "written_rows_per_s": written,
        "read_rows_per_s": 0.0,
        "is_tiered": True,
        "freshness_ms": 180_000,
        "lag_ms": lag_ms,
        "tiering": {},
        "unusable": [],
        "history": {"written_rows_per_s": []},
    }


def _state(name: str, *, end: int, tiered: int) -> dict[str, Any]:
    column = pa.field("id", pa.int64(), nullable=False)
    descriptor = TableDescriptor(
        path=TablePath.parse(name),
        schema=Schema.from_arrow(pa.schema([column])),
        bucket_count=1,
    )
    at = BucketPositions(log_start_offset=0, high_watermark=end, tiered_offset=tiered)
    state = TableState(
        table=TableInfo(descriptor=descriptor, table_id=1, created_at_us=0),
        positions={0: at},
        lake=LakeState(tiered_offsets={0: tiered}),
    )
    return state.to_json()


TABLES = [
    _table("log.z", rows=5, lag_ms=100),
    {**_table("shop.a", rows=1, lag_ms=300, written=9.5), "freshness_ms": 200},
    _table("shop.b", rows=30, lag_ms=200),
    _table("shop.c", rows=30, lag_ms=0),
]
STATUS = {
    "sample_interval_ms": 5_000,
    "table_count": len(TABLES),
    "workers": [
        {
            "worker_id": "w",
            "table": "shop.b",
            "round_ms": 10,
            "progress": {"step": "writing", "rows_done": 1, "rows_planned": 4},
        }
    ],
    "idle_workers": [],
    "damaged_tables": [],
    "strangers": [],
}
ANSWERS: dict[str, Any] = {
    "/v1/status": {**STATUS, "tables": TABLES[:2]},
    "/v1/status?detail=brief": {
        **STATUS,
        "tables": TABLES,
        "consumers": {"count": 1, "worst": [{"table": "shop.b", **CONSUMER}]},
    },
    "/v1/shards": {"shards": [SHARD, {**SHARD, "shard": "1", "is_live": False}]},
    "/v1/tables": {"tables": ["log.z", "shop.a", "shop.b", "shop.c"]},
    "/v1/tables/log.z/state": _state("log.z", end=5, tiered=5),
    "/v1/tables/shop.a/state": _state("shop.a", end=1, tiered=0),
    "/v1/tables/shop.b/state": _state("shop.b", end=90, tiered=60),
    "/v1/tables/shop.c/state": _state("shop.c", end=30, tiered=10),
    **{f"/v1/tables/{name}/consumers": {"consumers": []} for name in ("log.z", "shop.b", "shop.c")},
    "/v1/tables/shop.a/consumers": {"consumers": [CONSUMER]},
}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with canned_service(ANSWERS) as url:
        yield url


def _run(endpoint: str, *arguments: str) -> Result:
    env = {"COLUMNS": "100"}
    return CliRunner().invoke(cli, [*arguments, "--endpoint", endpoint], env=env)


def _names(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return [table["table"] for table in json.loads(result.stdout)["tables"]]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ([], ["shop.a", "log.z", "shop.b", "shop.c"]),
        (["--sort", "name"], ["log.z", "shop.a", "shop.b", "shop.c"]),
        (["--sort", "lag"], ["shop.a", "shop.b", "log.z", "shop.c"]),
        (["--sort", "rows"], ["shop.b", "shop.c", "log.z", "shop.a"]),
        (["--sort", "written", "--filter", "shop.*"], ["shop.a", "shop.b", "shop.c"]),
        (["--filter", "*.z", "--filter", "*.c"], ["log.z", "shop.c"]),
        (["--filter", "none.*"], []),
    ],
)
def test_top_shows_the_tables_wanted_in_the_order_wanted(
    endpoint: str, options: list[str], names: list[str]
) -> None:
    """All of them, though fewer are told in full."""
    assert _names(_run(endpoint, "top", "--once", "--json", *options)) == names

    shown = _run(endpoint, "top", "--once", *options)

    assert shown.exit_code == 0, shown.output
    places = [shown.output.index(name) for name in names]
    assert places == sorted(places)
    assert ("reader" in shown.output) == ("shop.b" in names)


def test_one_picture_is_one_line(endpoint: str) -> None:
    assert _run(endpoint, "top", "--once", "--json").stdout.count("\n") == 1


def test_shards_are_a_document_also_if_one_has_no_owner(endpoint: str) -> None:
    done = _run(endpoint, "shards", "--json")

    assert json.loads(done.stdout) == ANSWERS["/v1/shards"]
    assert isinstance(done.exception, UnavailableError)
    assert "no owner" in _run(endpoint, "shards").stdout


@pytest.mark.parametrize("path", [[], ["shop.a"]])
def test_consumers_are_a_document(endpoint: str, path: list[str]) -> None:
    done = _run(endpoint, "consumers", *path, "--json")

    assert json.loads(done.stdout) == {
        "consumers": [{"table": "shop.a", **CONSUMER}],
        "not_served": [],
    }
    assert "reader" in _run(endpoint, "consumers", *path).stdout


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ([], ["log.z", "shop.a", "shop.b", "shop.c"]),
        (["--sort", "lag"], ["shop.a", "shop.b", "log.z", "shop.c"]),
        (["--sort", "untiered"], ["shop.b", "shop.c", "shop.a", "log.z"]),
        (["--filter", "shop.*", "--sort", "rows"], ["shop.b", "shop.c", "shop.a"]),
        (["--filter", "none.*"], []),
    ],
)
def test_tables_shows_those_wanted_in_the_order_wanted(
    endpoint: str, options: list[str], names: list[str]
) -> None:
    assert _names(_run(endpoint, "tables", "--json", *options)) == names

    shown = _run(endpoint, "tables", *options)

    assert shown.exit_code == 0, shown.output
    places = [shown.output.index(name) for name in names]
    assert places == sorted(places)


def test_tables_says_which_are_late_and_how_late_if_asked(endpoint: str) -> None:
    _, *lines = _run(endpoint, "tables").stdout.splitlines()
    heading, first, second, *_ = _run(endpoint, "tables", "--sort", "lag").stdout.splitlines()

    assert [line.split("  ")[0] for line in lines if "late, 300 ms" in line] == ["shop.a"]
    assert "lag" in heading.split()
    assert first.count("300 ms") == 2
    assert second.startswith("shop.b")
    assert "200 ms" in second


def test_tables_are_a_document(endpoint: str) -> None:
    found = json.loads(_run(endpoint, "tables", "--json", "--filter", "shop.b").stdout)

    line = {
        "table": "shop.b",
        "bucket_count": 1,
        "is_primary_key_table": False,
        "row_count": 90,
        "log_rows": 90,
        "lake_rows": 60,
        "untiered_rows": 30,
        "is_tiered": True,
        "lag_ms": 200,
        "freshness_ms": 180_000,
        "scattered": None,
        "step": "writing",
        "rows_done": 1,
        "rows_planned": 4,
        "failures": 0,
        "diverged": None,
    }
    assert found == {"tables": [line], "not_served": []}
    assert list(line) == documented("tables")
    assert "writing 25%" in _run(endpoint, "tables", "--filter", "shop.b").stdout


def test_one_table_is_a_document(endpoint: str) -> None:
    found = json.loads(_run(endpoint, "tables", "shop.c", "--json").stdout)

    assert [column["name"] for column in found["schema"]] == ["id"]
    assert found["buckets"] == [
        {"bucket": 0, "log_start_offset": 0, "high_watermark": 30, "tiered_offset": 10}
    ]
    assert list(found["buckets"][0]) == documented("tables PATH")


@pytest.mark.parametrize("more", [["--filter", "shop.*"], ["--sort", "rows"], ["--sizes"]])
def test_what_is_for_lists_is_refused_for_one_table(more: list[str]) -> None:
    done = CliRunner().invoke(cli, ["tables", "shop.c", *more])

    assert done.exit_code == 2


def test_a_consumer_that_nobody_is_cannot_be_forgotten(endpoint: str) -> None:
    done = _run(endpoint, "consumers", "shop.a", "--forget", "readr")
    assert done.exit_code == 1
    assert "table 'shop.a' has no consumer 'readr'; did you mean 'reader'?" in done.stderr
