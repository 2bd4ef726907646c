"""Requests drawn from the OpenAPI of the service, right and wrong: every answer is a good one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.asgi_call import AsgiAnswer
from tests.support.examples import examples
from tests.support.in_process_service import InProcessService, in_process_service

# No wait may be long, no table may be large: it is the answers that matter.
_SMALL: Final = {
    "fetch_wait_ms_max": 1,
    "tables_max": 8,
    "buckets_max": 32,
    "databases_max": 8,
    "control_body_bytes_max": 65_536,
}


class World:
    """A service in a loop of its own, which examples are sent to one after the other."""

    def __init__(self, data_dir: Path) -> None:
        self._runner = asyncio.Runner()
        self._opened = AsyncExitStack()
        self.service: InProcessService = self._runner.run(
            self._opened.enter_async_context(in_process_service(data_dir, **_SMALL))
        )
        answer = self.call("GET", "/openapi.json")
        self.schema = schemathesis.openapi.from_dict(answer.json())
        self.operations = [found.ok() for found in self.schema.get_all_operations()]

    def call(self, method: str, path: str, **rest: Any) -> AsgiAnswer:
        return self._runner.run(self.service.call(method, path, **rest))

    def close(self) -> None:
        self._runner.run(self._opened.aclose())
        self._runner.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    opened = World(tmp_path_factory.mktemp("fuzz"))
    opened.call("POST", "/v1/tables", json_body={
        "path": "default.t", "schema": [{"name": "id", "type": "bigint"}],
    })  # fmt: skip
    yield opened
    opened.close()


def _is_answered_well(answer: AsgiAnswer) -> None:
    assert answer.is_complete
    if answer.status >= 400:
        status, code, message = answer.error()
        assert code != "internal", message
        assert status < 500 or answer.json()["error"]["retriable"], message
        assert message
        assert "Traceback" not in message
        assert len(message) < 4_000


@settings(
    max_examples=examples(100),
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
@given(st.data())
def test_every_answer_is_a_good_one(world: World, data: st.DataObject) -> None:
    operation = data.draw(st.sampled_from(world.operations))
    modes = list(schemathesis.GenerationMode)
    case = data.draw(operation.as_strategy(generation_mode=data.draw(st.sampled_from(modes))))
    if data.draw(st.booleans()) and "path" in (case.path_parameters or {}):
        # Most names that are drawn are no table's: nothing behind the name would be reached.
        case.path_parameters["path"] = "default.t"
    sent = requests.Request(**case.as_transport_kwargs(base_url="http://x")).prepare()
    assert sent.url is not None
    url = urlsplit(sent.url)
    body = sent.body or b""
    headers = {
        name: value if isinstance(value, str) else value.decode("latin-1")
        for name, value in sent.headers.items()
        if name.lower() != "content-length"
    }

    answer = world.call(
        sent.method or "GET",
        unquote(url.path),
        query=dict(parse_qsl(url.query, keep_blank_values=True)),
        headers={name: value for name, value in headers.items() if value.isascii()},
        body=body.encode() if isinstance(body, str) else bytes(body),
    )

    _is_answered_well(answer)
    assert world.call("GET", "/ready").status == 200


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 50_000,
        b'{"a":' * 10_000,
        b'{"name": ' + b"9" * 20_000 + b"}",
        b'{"name": "\xff\xfe"}',
        b'{"name": "a", "name": "b"}',
        b'{"name": 1e999}',
        b'{"name": NaN}',
        b'{"name": "\\ud800"}',
        json.dumps({"name": "x" * 70_000}).encode(),
        b"null",
        b"",
    ],
    ids=lambda body: repr(body[:20]),
)
@pytest.mark.parametrize("path", ["/v1/databases", "/v1/tables", "/v1/tiering/claim"])
def test_bodies_that_are_hard_on_a_parser(world: World, path: str, body: bytes) -> None:
    answer = world.call("POST", path, body=body, headers={"content-type": "application/json"})

    _is_answered_well(answer)
    assert 400 <= answer.status < 500 or b'"b"' in body
