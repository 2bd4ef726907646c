"""Requests that arrive after they were given up, repeated and answered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.client import StreamhouseClient
from streamhouse.storage_service.errors import UnknownOutcomeError
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


def _row(name: str) -> pa.Table:
    return pa.table({"id": [1], "name": [name]}, schema=SCHEMA)


@pytest.mark.parametrize("first", ["same", "other"])
def test_a_late_attempt_never_takes_the_place_of_the_next_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    with (
        ServiceProcess(tmp_path) as service,
        StreamhouseClient(service.endpoint) as client,
        StreamhouseClient(service.endpoint) as another,
    ):
        client.create_table("keys", SCHEMA, primary_key=["id"])
        client.upsert("keys", _row("same"))
        held: list[Callable[[], Any]] = []
        send = client.transport._send

        def hold(*args: Any, **kwargs: Any) -> Any:
            if not held:
                held.append(lambda: send(*args, **kwargs))
                raise UnknownOutcomeError("the connection broke")
            return send(*args, **kwargs)

        with monkeypatch.context() as slow:
            slow.setattr(client.transport, "_send", hold)
            # Its first attempt is still on its way when the second is answered.
            client.upsert("keys", _row(first))
        another.upsert("keys", _row("another's"))
        held.pop()()

        client.upsert("keys", _row("next"))

        assert client.lookup_one("keys", id=1) == {"id": 1, "name": "next"}
