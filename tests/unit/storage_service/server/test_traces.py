"""Spans of a service: of requests that are part of a trace, with what each has waited for."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry.trace import SpanKind, StatusCode

from streamhouse.storage_service.log.replica import Replication
from tests.support.asgi_call import AsgiAnswer
from tests.support.in_process_service import (
    EVENTS,
    InProcessService,
    append_body,
    event_rows,
    in_process_service,
)
from tests.support.span_world import CARRIED, SPAN_ID, TRACE_ID, UNSAMPLED, KeptSpans, names

ROWS = append_body(EVENTS, [(None, 0, event_rows(0, 3))])
MORE = append_body(EVENTS, [(None, 0, event_rows(2, 5))])
KEY = pa.schema([EVENTS.field("id")])
KEYS = append_body(KEY, [(None, 0, pa.record_batch([pa.array([1, 9])], schema=KEY))])


@contextlib.asynccontextmanager
async def _traced(
    directory: Path, **config: Any
) -> AsyncIterator[tuple[InProcessService, KeptSpans]]:
    kept = KeptSpans()
    async with in_process_service(directory, spans=kept.spans, **config) as service:
        await service.create_table("plain")
        await service.create_table("keyed", primary_key=("id",))
        yield service, kept


async def _post(
    service: InProcessService, path: str, body: bytes = ROWS, **headers: str
) -> AsgiAnswer:
    headers = {"traceparent": CARRIED, **headers}
    return await service.call("POST", f"/v1/tables/{path}", body=body, headers=headers)


async def test_an_append_is_a_span_of_its_callers_trace(tmp_path: Path) -> None:
    async with _traced(tmp_path) as (service, kept):
        answer = await _post(service, "plain/append")

        assert answer.status == 200, answer.body
        span, stages = kept.taken()
    assert (span.name, span.kind) == ("POST /v1/tables/{path}/append", SpanKind.SERVER)
    assert span.context is not None
    assert span.parent is not None
    assert (span.context.trace_id, span.parent.span_id) == (TRACE_ID, SPAN_ID)
    assert dict(span.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": "/v1/tables/{path}/append",
        "http.response.status_code": 200,
        "streamhouse.request_id": answer.headers["x-request-id"],
        "streamhouse.table": "plain",
    }
    assert span.status.status_code is StatusCode.UNSET
    assert names(stages) == ["body", "decode", "gate", "queue", "sync", "publish"]
    times = [span.start_time, *(t for s in stages for t in (s.start_time, s.end_time))]
    assert all(a is not None and b is not None and a <= b for a, b in itertools.pairwise(times))
    assert times[-1] is not None
    assert span.end_time is not None
    assert times[-1] <= span.end_time


@pytest.mark.parametrize(
    ("path", "body", "stages"),
    [
        ("keyed/upsert", MORE, "body decode gate turn plan queue sync apply"),
        ("keyed/delete", KEYS, "body decode gate turn plan queue sync apply"),
        ("keyed/lookup", KEYS, "body find"),
    ],
)
async def test_the_stages_of_calls_by_key(
    tmp_path: Path, path: str, body: bytes, stages: str
) -> None:
    async with _traced(tmp_path) as (service, kept):
        assert (await service.call("POST", "/v1/tables/keyed/upsert", body=ROWS)).status == 200
        assert kept.count() == 0

        answer = await _post(service, path, body)

        assert answer.status == 200, answer.body
        _, found = kept.taken()
        assert names(found) == stages.split()


async def test_the_stages_of_a_fetch(tmp_path: Path) -> None:
    async with _traced(tmp_path) as (service, kept):
        await service.append([(None, 0, event_rows(0, 3))], path="plain")

        answer = await service.call(
            "GET",
            "/v1/tables/plain/buckets/0/fetch",
            query={"offset": "0"},
            headers={"traceparent": CARRIED},
        )

        assert answer.status == 200, answer.body
        _, found = kept.taken()
        assert {"wait", "read"} <= set(names(found))


@pytest.mark.parametrize(
    ("table", "operation", "rows"),
    [
        ("plain", "append", "queue sync"),
        ("keyed", "upsert", "gate turn plan queue sync apply"),
    ],
)
async def test_the_stages_of_a_commit(
    tmp_path: Path, table: str, operation: str, rows: str
) -> None:
    url = f"/v1/tables/{table}/transactions"
    async with _traced(tmp_path) as (service, kept):
        begun = await service.call("POST", url, json_body={"operation": operation})
        url += f"/{begun.json()['transaction_id']}"
        staged = await service.call("POST", f"{url}/stage", body=ROWS)

        answer = await service.call(
            "POST",
            f"{url}/commit",
            json_body={"parts": [staged.json()["part"]]},
            headers={"traceparent": CARRIED},
        )

        assert answer.status == 200, answer.body
        _, found = kept.taken()
        middle = [name for name in rows.split() if name != "gate"]
        assert [n for n in names(found) if n != "thread"] == [
            *("body", "gate", "decide"),
            *middle,
            "finish",
        ]


class _QuickReplica:
    """Another place that has everything at once, and is waited for."""

    recorded_position = stored_position = 0

    def when_stored(self, position: int, callback: Callable[[], None]) -> None:
        callback()

    def wait_stored(self, position: int) -> None:
        pass

    def gather(self) -> None:
        pass


async def test_a_journal_that_is_waited_for_is_a_stage(tmp_path: Path) -> None:
    async with _traced(tmp_path, replication=Replication(replica=_QuickReplica())) as (
        service,
        kept,
    ):
        assert (await _post(service, "plain/append")).status == 200
        assert names(kept.taken()[1])[-3:] == ["sync", "journal", "publish"]

        assert (await _post(service, "keyed/upsert")).status == 200
        assert names(kept.taken()[1])[-3:] == ["sync", "journal", "apply"]


NO_TRACE: tuple[dict[str, str], ...] = (
    {},
    {"traceparent": UNSAMPLED},
    {"traceparent": "00-00000000000000000000000000000000-b7ad6b7169203331-01"},
    {"traceparent": CARRIED.upper()[:-3]},
    {"traceparent": "x" * 60_000},
    {"traceparent": "\u00ff"},
    {"tracestate": "a=b"},
)


async def test_what_is_part_of_no_recorded_trace_has_no_span(tmp_path: Path) -> None:
    async with _traced(tmp_path) as (service, kept):
        for headers in NO_TRACE:
            answer = await service.call(
                "POST", "/v1/tables/plain/append", body=ROWS, headers=headers
            )

            assert (answer.status, kept.count()) == (200, 0), headers


async def test_who_is_not_let_in_makes_no_spans(tmp_path: Path) -> None:
    kept = KeptSpans()
    async with in_process_service(tmp_path, spans=kept.spans, token="correct-horse") as service:
        assert (await _post(service, "plain/append")).status == 401
        assert (await _post(service, "plain/append", authorization="Bearer x")).status == 401
        assert kept.count() == 0

        answer = await _post(service, "plain/append", authorization="Bearer correct-horse")

        assert answer.status == 404
        span, _ = kept.taken()
    assert (span.attributes or {})["error.type"] == "table_not_found"
    assert (span.attributes or {})["http.response.status_code"] == 404
    # The caller's mistake is none of the service's.
    assert span.status.status_code is StatusCode.UNSET


async def test_a_request_that_the_service_fails_is_an_error(tmp_path: Path) -> None:
    async with _traced(tmp_path) as (service, kept):
        service.service.is_draining = True

        assert (await _post(service, "plain/append")).status == 503

        span, _ = kept.taken()
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "unavailable"


async def test_the_next_request_of_a_connection_has_its_own_stages(tmp_path: Path) -> None:
    async with _traced(tmp_path) as (service, kept):
        await _post(service, "plain/append")
        first = kept.taken()[1]
        await service.call("POST", "/v1/tables/plain/append", body=ROWS)
        assert kept.count() == 0

        await _post(service, "plain/append")

        assert names(kept.taken()[1]) == names(first)
