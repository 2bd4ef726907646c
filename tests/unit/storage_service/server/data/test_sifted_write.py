"""Rows over HTTP that fit, and those that do not, in one request: both are written, or neither."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.errors import UnavailableError
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.engine.transactions.transaction_files import (
    Decision,
    TransactionFiles,
)
from tests.support.asgi_call import AsgiAnswer
from tests.support.held_step import around
from tests.support.in_process_service import InProcessService, append_body, in_process_service

SIZES = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("size", pa.int32()),
        pa.field("day", pa.date32()),
    ]
)
KINDS = pytest.mark.parametrize("verb", ["append", "upsert"])
ROWS = [
    {"id": 1, "size": 10, "day": "2026-01-01"},
    {"id": 2, "size": "ten"},
    {"size": 3},
    {"id": 4, "size": "40", "day": None},
    {"id": 5, "sise": 1},
    {"id": 6, "size": 2**40},
]
ONCE = "0123456789abcdef" * 2


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[InProcessService]:
    async with in_process_service(tmp_path) as opened:
        yield opened


async def _create(service: InProcessService, verb: str) -> None:
    key = ("id",) if verb == "upsert" else ()
    await service.create_table("sizes", SIZES, primary_key=key, bucket_count=2)


async def _write(
    service: InProcessService, verb: str, rows: Any = None, **query: str
) -> AsgiAnswer:
    return await service.call(
        "POST", f"/v1/tables/sizes/{verb}", query=query, json_body=ROWS if rows is None else rows
    )


def _end(service: InProcessService, path: str) -> int:
    """Return how many rows a table has; 0 if there is none."""
    known = {table.path.table: table for table in service.service.manager.open_tables()}
    if path not in known:
        return 0
    return sum(tablet.high_watermark for tablet in known[path].tablets)


def _ends(service: InProcessService) -> tuple[int, int]:
    return _end(service, "sizes"), _end(service, "sizes__rejected")


@KINDS
async def test_one_request_of_json_rows_keeps_both_kinds(
    service: InProcessService, verb: str
) -> None:
    await _create(service, verb)

    answer = await _write(service, verb, on_error="reject")

    assert answer.status == 200, answer.body
    said = answer.json()
    assert (said["status"], said["row_count"], said["rejected_count"]) == ("committed", 2, 4)
    assert sum(end - start for start, end in said["buckets"].values()) == 2
    assert _ends(service) == (2, 4)


@KINDS
async def test_one_request_of_arrow_rows_keeps_both_kinds(
    service: InProcessService, verb: str
) -> None:
    await _create(service, verb)
    rows = pa.record_batch(
        {"id": [1, None, 3], "size": ["1", "2", "x"], "day": pa.nulls(3, pa.string())}
    )

    answer = await service.call(
        "POST",
        f"/v1/tables/sizes/{verb}",
        query={"on_error": "reject"},
        body=append_body(rows.schema, [(None, 0, rows)]),
    )

    assert answer.status == 200, answer.body
    assert (answer.json()["row_count"], answer.json()["rejected_count"]) == (1, 2)
    assert _ends(service) == (1, 2)


@KINDS
async def test_rows_that_all_fit_make_no_other_table(service: InProcessService, verb: str) -> None:
    await _create(service, verb)

    for rows in ([ROWS[0], {"id": 7}], []):
        for query in ({}, {"on_error": "reject"}):
            answer = await _write(service, verb, rows, **query)
            assert answer.status == 200, answer.body
            said = answer.json()
            assert (said["row_count"], said["rejected_count"]) == (len(rows), 0)

    assert _ends(service) == (4 if verb == "append" else 2, 0)
    assert len(list(service.service.manager.open_tables())) == 1


@KINDS
async def test_without_on_error_one_bad_row_refuses_all(
    service: InProcessService, verb: str
) -> None:
    await _create(service, verb)

    answer = await _write(service, verb)

    assert answer.status == 400
    message = answer.json()["error"]["message"]
    assert "row 1, column 'size': 'ten' is no int" in message
    assert "nothing was written" in message
    assert _ends(service) == (0, 0)


@KINDS
async def test_a_repeated_request_is_answered_alike_and_done_once(
    service: InProcessService, verb: str, tmp_path: Path
) -> None:
    await _create(service, verb)
    query = {"on_error": "reject", "transaction_id": ONCE}
    first, *others = await asyncio.gather(*(_write(service, verb, **query) for _ in range(3)))
    assert first.status == 200, first.body
    assert [other.json() for other in others] == [first.json()] * 2
    again = await _write(service, verb, **query)
    assert again.json() == first.json()
    assert _ends(service) == (2, 4)
    # Nothing is left that would keep the table from moving, or from changing its schema.
    assert service.service.manager.transactions.open_count == 0


@KINDS
async def test_a_version_is_written_once(service: InProcessService, verb: str) -> None:
    await _create(service, verb)
    for version, status in ((3, "committed"), (3, "skipped"), (2, "skipped"), (4, "committed")):
        answer = await _write(
            service, verb, on_error="reject", app_id="loader", version=str(version)
        )
        assert answer.json()["status"] == status
        assert answer.json()["rejected_count"] == (4 if status == "committed" else 0)
    assert _end(service, "sizes__rejected") == 8


@KINDS
async def test_what_fails_before_the_decision_leaves_nothing_and_may_be_repeated(
    service: InProcessService, verb: str
) -> None:
    await _create(service, verb)

    def decide(real: Any, files: TransactionFiles, decision: Decision) -> None:
        raise UnavailableError("not now")

    query = {"on_error": "reject", "transaction_id": ONCE}
    with pytest.MonkeyPatch.context() as patch:
        around(patch, "decision-writing", decide)
        assert (await _write(service, verb, **query)).status == 503
    assert _ends(service) == (0, 0)
    assert service.service.manager.transactions.open_count == 0
    assert (await _write(service, verb, **query)).status == 200
    assert _ends(service) == (2, 4)


async def test_a_restart_knows_what_was_done(tmp_path: Path) -> None:
    query = {"on_error": "reject", "transaction_id": ONCE}
    async with in_process_service(tmp_path) as service:
        await _create(service, "append")
        first = await _write(service, "append", **query)
    async with in_process_service(tmp_path) as service:
        assert (await _write(service, "append", **query)).json() == first.json()
        assert _ends(service) == (2, 4)


async def test_what_is_rejected_is_kept_as_it_came(service: InProcessService) -> None:
    await _create(service, "upsert")
    half = (
        '[{"id": 1, "size": "\\ud800"}, {"\\ud800": 1, "id": 2}, {"id": 3, "__change_type": "?"}]'
    )

    answer = await service.call(
        "POST",
        "/v1/tables/sizes/upsert",
        query={"on_error": "reject", "source": "till 7", "first_row": "40"},
        headers={"content-type": "application/json; charset=utf-8"},
        body=half.encode(),
    )

    assert answer.json()["rejected_count"] == 3, answer.body
    table = service.service.manager.table(TablePath.parse("sizes$rejected"))
    [row] = [row for row in (await _kept(service, table)) if row["source_row"] == 41]
    assert row["source"] == "till 7"
    assert json.loads(row["row"]) == {"\ud800": 1, "id": 2}
    assert "no column" in row["reason"]


async def _kept(service: InProcessService, table: Any) -> list[dict[str, Any]]:
    answer = await service.call(
        "GET", f"/v1/tables/{table.path}/buckets/0/fetch", query={"offset": "0"}
    )
    return list(pa.ipc.open_stream(answer.body).read_all().to_pylist())


@pytest.mark.parametrize(
    ("query", "body", "why"),
    [
        ({"on_error": "skip"}, "[]", "not one of refuse, reject"),
        ({"on_error": "reject", "writer_id": "7"}, "[]", "takes no writer_id"),
        ({"on_error": "reject", "transaction_id": "../7"}, "[]", "32 hexadecimal digits"),
        ({"on_error": "reject", "app_id": "a"}, '[{"id": 1}]', "an app_id and a version"),
        ({"on_error": "reject", "version": "x"}, "[]", "must be a whole number"),
        ({"on_error": "reject", "source": "x" * 201}, "[]", "source has more than"),
        ({"on_error": "reject", "first_row": "-1"}, "[]", "must be a whole number"),
        ({}, "{}", "must be a JSON list of rows"),
        ({}, "[1]", "row 0 is no JSON object"),
        ({}, "[" * 100_000, "is nested deeper than 64"),
        ({}, "[{]", "is no JSON"),
    ],
)
async def test_what_is_wrong_is_said_in_one_sentence(
    service: InProcessService, query: dict[str, str], body: str, why: str
) -> None:
    await _create(service, "append")

    answer = await service.call(
        "POST",
        "/v1/tables/sizes/append",
        query=query,
        headers={"content-type": "application/json"},
        body=body.encode(),
    )

    assert answer.status == 400, answer.body
    assert why in answer.json()["error"]["message"]
    assert _ends(service) == (0, 0)


@pytest.mark.parametrize(
    "body",
    [
        b'[{"l": [' + b",".join([b"null"] * 20_000) + b"]}]",
        b"[" + b",".join([b"{}"] * 20_000) + b"]",
    ],
)
async def test_few_letters_do_not_become_many_bytes(service: InProcessService, body: bytes) -> None:
    wide = pa.struct([(f"c{n}", pa.int64()) for n in range(1_000)])
    await service.create_table("wide", pa.schema([("l", pa.list_(wide)), ("s", wide)]))

    answer = await service.call(
        "POST",
        "/v1/tables/wide/append",
        headers={"content-type": "application/json"},
        body=body,
    )

    assert answer.status == 413, answer.body
    assert "take more than" in answer.json()["error"]["message"]


async def test_arrow_rows_name_no_bucket_and_a_delete_is_no_such_write(
    service: InProcessService,
) -> None:
    await _create(service, "upsert")
    rows = pa.record_batch({"id": [1], "size": ["x"], "day": pa.nulls(1, pa.date32())})
    named = await service.call(
        "POST",
        "/v1/tables/sizes/upsert",
        query={"on_error": "reject"},
        body=append_body(rows.schema, [(0, 0, rows)]),
    )
    assert "name no bucket" in named.json()["error"]["message"]
    deleted = await service.call(
        "POST", "/v1/tables/sizes/delete", query={"on_error": "reject"}, json_body=[{"id": 1}]
    )
    assert deleted.status == 400
    assert _ends(service) == (0, 0)
