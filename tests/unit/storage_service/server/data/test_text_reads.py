"""Rows that are fetched, subscribed to and looked up as JSON, NDJSON and events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.support.asgi_call import AsgiAnswer, AsgiCall
from tests.support.in_process_service import InProcessService, in_process_service

SIZES = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
JSON, NDJSON, EVENTS = "application/json", "application/x-ndjson", "text/event-stream"
FETCH = "/v1/tables/sizes/buckets/0/fetch"
SUBSCRIBE = "/v1/tables/sizes/subscribe"


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[InProcessService]:
    async with in_process_service(tmp_path) as opened:
        yield opened


async def _create(service: InProcessService, primary_key: tuple[str, ...] = ()) -> None:
    await service.create_table("sizes", SIZES, primary_key=primary_key)


async def _write(service: InProcessService, verb: str, *rows: Mapping[str, Any]) -> None:
    answer = await service.call("POST", f"/v1/tables/sizes/{verb}", json_body=rows)
    assert answer.status == 200, answer.body


async def _get(service: InProcessService, path: str, accept: str, **query: str) -> AsgiAnswer:
    return await service.call("GET", path, query=query, headers={"accept": accept})


def _named(*ids: int) -> list[dict[str, Any]]:
    return [{"id": i, "name": f'"{i}"\n\u2028'} for i in ids]


async def test_a_fetch_as_json_has_the_rows_that_were_asked_for(service: InProcessService) -> None:
    await _create(service)
    await _write(service, "append", *_named(0, 1, 2))
    await _write(service, "append", *_named(3, 4))

    answer = await _get(
        service, FETCH, f"text/html, {JSON};q=0.9", offset="1", end_offset="4", table_id="1"
    )

    assert answer.headers["content-type"] == JSON
    page = answer.json()
    (first, before_us), (second, after_us) = page.pop("written_us")
    assert (first, second) == (1, 3)
    assert before_us < after_us
    assert page == {
        "table_id": 1,
        "bucket": 0,
        "first_offset": 1,
        "next_offset": 4,
        "log_start_offset": 0,
        "high_watermark": 5,
        "rows": _named(1, 2, 3),
    }


async def test_a_fetch_as_ndjson_can_be_appended_again(service: InProcessService) -> None:
    await _create(service)
    await _write(service, "append", *_named(0, 1))

    fetched = await _get(service, FETCH, NDJSON, offset="0")
    again = await service.call(
        "POST", "/v1/tables/sizes/append", headers={"content-type": NDJSON}, body=fetched.body
    )
    rest = await _get(service, FETCH, NDJSON, offset=fetched.headers["x-next-offset"], table_id="1")

    assert again.status == 200
    assert rest.body == fetched.body
    assert [json.loads(line) for line in rest.body.splitlines()] == _named(0, 1)
    assert (await _get(service, FETCH, NDJSON, offset="4", table_id="1")).body == b""


async def test_whoever_asks_for_anything_gets_arrow(service: InProcessService) -> None:
    await _create(service)
    await _write(service, "append", *_named(0))

    for accept in ("*/*", "text/html", "application/vnd.apache.arrow.stream, application/json"):
        answer = await _get(service, FETCH, accept, offset="0")
        assert answer.headers["content-type"] == "application/vnd.apache.arrow.stream"


async def test_a_changelog_as_json_names_its_changes(service: InProcessService) -> None:
    await _create(service, ("id",))
    await _write(service, "upsert", {"id": 1, "name": "a"})
    await _write(service, "upsert", {"id": 1, "name": "b"}, {"id": 2, "__change_type": "-D"})

    rows = (await _get(service, FETCH, JSON, offset="0")).json()["rows"]

    assert [(row["__change_type"], row["name"]) for row in rows] == [
        ("+I", "a"), ("-U", "a"), ("+U", "b"),
    ]  # fmt: skip


async def test_lookups_of_json_are_answered_in_json(service: InProcessService) -> None:
    await _create(service, ("id",))
    await _write(service, "upsert", *_named(1, 2))
    path = "/v1/tables/sizes/lookup"

    async def look_up(kind: str, body: bytes, **query: str) -> AsgiAnswer:
        headers = {"content-type": kind, "accept": kind}
        return await service.call("POST", path, query=query, headers=headers, body=body)

    rows = await look_up(JSON, b'[{"id": 2}, {"id": 9}, {"id": "1"}]')
    lines = await look_up(NDJSON, b'{"id": 2}\n{"id": 9}\n', columns="id")
    many = await look_up(NDJSON, b"".join(b'{"id":%d}\n' % i for i in range(3_000)))
    prefixes = await service.call(
        "POST",
        "/v1/tables/sizes/prefix_lookup",
        headers={"content-type": JSON, "accept": JSON},
        body=b'[{"id": 2}]',
    )

    assert rows.json() == {"rows": [*_named(2), None, *_named(1)]}
    assert lines.body == b'{"id": 2}\nnull\n'
    assert len(many.body.splitlines()) == 3_000
    assert prefixes.json() == {"rows": _named(2)}
    for body in (
        b"{}",
        b"[1]",
        b'[{"id": 1, "name": "x"}]',
        b'[{"id": "x"}]',
        b"[",
        b'[{"id": null}]',
    ):
        assert (await look_up(JSON, body)).status == 400, body


class _Events:
    """A subscription as a browser has it."""

    def __init__(self, service: InProcessService, **headers: str) -> None:
        self._call = AsgiCall(
            service.app, "GET", SUBSCRIBE, query={"format": "sse", "start": "earliest"},
            headers=headers,
        )  # fmt: skip
        self._task = asyncio.create_task(self._call.run())

    async def __aenter__(self) -> _Events:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.disconnect()
        await self._task

    async def rows(self, count: int) -> list[dict[str, str]]:
        """Return the events when those with rows have so many."""
        while True:
            events = self.events()
            found = [json.loads(e["data"])["rows"] for e in events if e["event"] == "rows"]
            if sum(map(len, found)) >= count:
                return events
            await self._call.sent(len(self._call.answer.body))

    def events(self) -> list[dict[str, str]]:
        whole = self._call.answer.body.decode().split("\n\n")[:-1]
        return [dict(line.split(": ", 1) for line in text.split("\n")) for text in whole]

    @property
    def answer(self) -> AsgiAnswer:
        return self._call.answer


async def test_a_browser_follows_a_table_and_goes_on_where_it_was(
    service: InProcessService,
) -> None:
    await _create(service)
    await _write(service, "append", *_named(0, 1))

    async with _Events(service) as browser:
        before = await browser.rows(2)
        await _write(service, "append", *_named(2))
        events = await browser.rows(3)
    await _write(service, "append", *_named(3))
    async with _Events(service, **{"last-event-id": events[-1]["id"]}) as browser:
        after = await browser.rows(1)

    assert browser.answer.headers["content-type"] == EVENTS
    assert json.loads(before[-1]["data"])["rows"] == _named(0, 1)
    assert json.loads(events[-1]["id"]) == {"table_id": 1, "offsets": {"0": 3}}
    rows = [row for e in after if e["event"] == "rows" for row in json.loads(e["data"])["rows"]]
    assert rows == _named(3)
    assert not service.service.subscriptions


async def test_an_empty_table_says_where_it_is(service: InProcessService) -> None:
    await _create(service)

    async with _Events(service) as browser:
        while not browser.events():
            await browser._call.sent(len(browser.answer.body))
        first = browser.events()[0]

    place = '{"table_id": 1, "offsets": {"0": 0}}'
    assert first == {"id": place, "event": "positions", "data": '{"0": [0, 0]}'}


async def test_positions_that_are_none_are_refused(service: InProcessService) -> None:
    await _create(service)

    for headers in (
        {"last-event-id": "x"},
        {"last-event-id": "[]"},
        {"last-event-id": '{"0": 0}'},
        {"last-event-id": '{"table_id": 1, "offsets": []}'},
        *(
            {"last-event-id": f'{{"table_id": {table_id}, "offsets": {offsets}}}'}
            for table_id, offsets in (
                *((1, '{"0": []}'), (1, '{"0": 5}'), (1, '{"7": 0}'), (1, '{"0": "a"}')),
                *((1, '{"0": [0, 1]}'), ("null", '{"0": 0}'), ('"x"', '{"0": 0}'), (2, "{}")),
            )
        ),
    ):
        answer = await service.call("GET", SUBSCRIBE, query={"format": "sse"}, headers=headers)
        assert answer.status in (400, 404, 416), (headers, answer.body)
    other = await service.call("GET", SUBSCRIBE, query={"format": "xml"})
    assert other.error()[:2] == (400, "invalid_request")
