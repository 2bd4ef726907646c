"""Requests that arrive after they were given up, repeated and answered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse import Producer
from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import UnknownOutcomeError
from tests.support.held_step import around
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


def _row(name: str) -> pa.Table:
    return pa.table({"id": [1], "name": [name]}, schema=SCHEMA)


@contextlib.contextmanager
def _client_writes(client: StreamhouseClient) -> Iterator[Callable[[pa.Table], object]]:
    yield lambda rows: client.upsert("keys", rows)


@contextlib.contextmanager
def _producer_writes(client: StreamhouseClient) -> Iterator[Callable[[pa.Table], object]]:
    with Producer(client, "keys", operation="upsert", linger_ms=0) as producer:
        yield lambda rows: producer.send(rows).result()


@pytest.mark.parametrize("first", ["same", "other"])
@pytest.mark.parametrize("writes", [_client_writes, _producer_writes])
def test_a_late_attempt_never_takes_the_place_of_the_next_write(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    writes: Callable[
        [StreamhouseClient], contextlib.AbstractContextManager[Callable[[pa.Table], object]]
    ],
    first: str,
) -> None:
    with (
        ServiceProcess(tmp_path) as service,
        StreamhouseClient(service.endpoint) as client,
        StreamhouseClient(service.endpoint) as another,
    ):
        client.create_table("keys", SCHEMA, primary_key=["id"])
        with writes(client) as write:
            write(_row("same"))
            held: list[Callable[[], Any]] = []

            def hold(send: Any, *args: Any, **kwargs: Any) -> Any:
                if not held:
                    held.append(lambda: send(*args, **kwargs))
                    raise UnknownOutcomeError("the connection broke")
                return send(*args, **kwargs)

            with monkeypatch.context() as slow:
                around(slow, "request-sending", hold)
                # Its first attempt is still on its way when the second is answered.
                write(_row(first))
            another.upsert("keys", _row("another's"))
            held.pop()()

            write(_row("next"))

            assert client.lookup_one("keys", id=1) == {"id": 1, "name": "next"}
