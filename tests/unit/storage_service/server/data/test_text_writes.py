"""NDJSON and CSV over HTTP: appended and upserted as a whole, once, or not at all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.asgi_call import AsgiAnswer
from tests.support.in_process_service import InProcessService, in_process_service

NDJSON = "application/x-ndjson"
CSV = "text/csv; charset=utf-8"
SIZES = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("size", pa.int32())])
BODIES = {
    NDJSON: (b'{"id":1,"size":10}\n{"id":2}\n', b'{"id":1}\n{"id":2,"size":"ten"}\n{"id":3}\n'),
    CSV: (b"id,size\n1,10\n2,\n", b"id,size\n1,\n2,ten\n3,\n"),
}
KINDS = pytest.mark.parametrize("verb", ["append", "upsert"])
FORMS = pytest.mark.parametrize("form", BODIES)
ONCE = "0123456789abcdef" * 2


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[InProcessService]:
    async with in_process_service(tmp_path) as opened:
        yield opened


async def _create(service: InProcessService, verb: str) -> None:
    key = ("id",) if verb == "upsert" else ()
    await service.create_table("sizes", SIZES, primary_key=key, bucket_count=2)


async def _write(
    service: InProcessService, verb: str, form: str, body: bytes, **query: str
) -> AsgiAnswer:
    return await service.call(
        "POST",
        f"/v1/tables/sizes/{verb}",
        query=query,
        headers={"content-type": form},
        body=body,
    )


def _ends(service: InProcessService) -> dict[str, int]:
    return {
        str(table.path.table): sum(tablet.high_watermark for tablet in table.tablets)
        for table in service.service.manager.open_tables()
    }


@KINDS
@FORMS
async def test_all_rows_are_written(service: InProcessService, verb: str, form: str) -> None:
    await _create(service, verb)

    answer = await _write(service, verb, form, BODIES[form][0])

    assert answer.status == 200, answer.body
    assert answer.json()["row_count"] == 2
    assert _ends(service) == {"sizes": 2}
    assert service.service.body_memory.held == 0


@KINDS
@FORMS
async def test_one_wrong_line_refuses_all(service: InProcessService, verb: str, form: str) -> None:
    await _create(service, verb)
    line = 2 if form == NDJSON else 3

    status, code, message = (await _write(service, verb, form, BODIES[form][1])).error()

    assert (status, code) == (400, "schema_mismatch")
    assert f"line {line}, column 'size': 'ten' is no int" in message
    assert _ends(service) == {"sizes": 0}


@KINDS
@FORMS
async def test_rows_that_do_not_fit_are_kept(
    service: InProcessService, verb: str, form: str
) -> None:
    await _create(service, verb)

    said = (await _write(service, verb, form, BODIES[form][1], on_error="reject")).json()

    assert (said["row_count"], said["rejected_count"]) == (2, 1)
    assert _ends(service) == {"sizes": 2, "sizes__rejected": 1}


@KINDS
@FORMS
async def test_a_repeated_body_is_written_once(
    service: InProcessService, verb: str, form: str
) -> None:
    await _create(service, verb)

    answers = [
        (await _write(service, verb, form, BODIES[form][0], transaction_id=ONCE)).json()
        for _ in range(2)
    ]

    assert answers[0] == answers[1]
    assert _ends(service) == {"sizes": 2}


@FORMS
async def test_many_lines_are_one_append(service: InProcessService, form: str) -> None:
    await _create(service, "append")
    if form == NDJSON:
        body = b"".join(b'{"id":%d,"size":7}\n' % i for i in range(100_000))
    else:
        body = b"id,size\n" + b"".join(b"%d,7\n" % i for i in range(100_000))

    answer = await _write(service, "append", form, body)

    assert answer.json()["row_count"] == 100_000
    assert _ends(service) == {"sizes": 100_000}


@FORMS
async def test_what_texts_do_not_have_is_said(service: InProcessService, form: str) -> None:
    await _create(service, "append")

    for query in ({"writer_id": "1"}, {"on_error": "keep"}, {"nothing": "1"}):
        assert (await _write(service, "append", form, BODIES[form][0], **query)).status == 400
    empty = await _write(service, "append", form, b"")
    other = await _write(service, "append", "text/plain", BODIES[form][0])

    assert (empty.status == 200) == (form == NDJSON)
    assert other.error()[:2] == (400, "invalid_request")
    assert _ends(service) == {"sizes": 0}


KEYS = {
    NDJSON: b'{"id":2}\n\n{"id":"7"}\n{"id":3}\n',
    CSV: b"id\n2\n7\n3\n",
    "application/json": b'[{"id": 2}, {"id": 7}, {"id": 3}]',
}


@pytest.mark.parametrize("form", KEYS)
async def test_keys_are_deleted(service: InProcessService, form: str) -> None:
    await _create(service, "upsert")
    await _write(service, "upsert", CSV, b"id,size\n1,10\n2,20\n3,30\n4,\n")

    answer = await _write(service, "delete", form, KEYS[form])

    assert answer.status == 200, answer.body
    assert answer.json()["row_count"] == 3
    found = await service.call(
        "POST",
        "/v1/tables/sizes/lookup",
        headers={"content-type": "application/json", "accept": "application/json"},
        body=b'[{"id": 1}, {"id": 2}, {"id": 3}, {"id": 4}]',
    )
    assert found.json()["rows"] == [{"id": 1, "size": 10}, None, None, {"id": 4, "size": None}]
    ends = _ends(service)
    assert (await _write(service, "delete", form, KEYS[form])).status == 200
    assert _ends(service) == ends
    assert service.service.body_memory.held == 0


@pytest.mark.parametrize(
    ("form", "body", "code", "words"),
    [
        (
            NDJSON,
            b'{"id":1}\n{"id":1,"size":5}\n',
            "schema_mismatch",
            "line 2: the key (id) has no column 'size'; nothing was deleted",
        ),
        (
            CSV,
            b"id,size\n1,5\n",
            "unknown_column",
            "line 1: the key (id) has no column 'size'; nothing was deleted",
        ),
        (
            "application/json",
            b'[{"id": 1, "size": 5}]',
            "schema_mismatch",
            "row 0: the key (id) has no column 'size'; nothing was deleted",
        ),
        (NDJSON, b'{"id":1}\n{}\n', "schema_mismatch", "line 2, column 'id': null"),
        (CSV, b"id\n1\nx\n", "schema_mismatch", "line 3, column 'id': 'x' is no bigint"),
        (NDJSON, b'{"id":1,"__change_type":"+U"}\n', "schema_mismatch", "has no column"),
        (CSV, b"id,__change_type\n1,+U\n", "unknown_column", "has no column"),
    ],
)
async def test_what_is_no_key_deletes_nothing(
    service: InProcessService, form: str, body: bytes, code: str, words: str
) -> None:
    await _create(service, "upsert")
    await _write(service, "upsert", CSV, b"id,size\n1,10\n")

    status, said, message = (await _write(service, "delete", form, body)).error()

    assert (status, said) == (400, code)
    assert words in message
    assert "on_error" not in message
    assert _ends(service) == {"sizes": 1}
    assert (await _write(service, "delete", form, body, on_error="reject")).status == 400
