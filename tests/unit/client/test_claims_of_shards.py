"""A tiering worker that knows one shard of a service claims the tables of all."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from streamhouse.client import StorageClient, TieringIdle
from tests.support.free_ports import free_port
from tests.support.scripted_server import ScriptedServer


def _answer(value: Any) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def _idle(retry_after_ms: int, **more: Any) -> bytes:
    idle = {"assignment": None, "reason": "nothing_to_tier", "retry_after_ms": retry_after_ms}
    return _answer({**idle, **more})


@contextlib.contextmanager
def _shards(*retries_ms: int) -> Iterator[list[ScriptedServer]]:
    """Shards without tables to tier, each of which names all."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ScriptedServer()) for _ in retries_ms]
        urls = [server.endpoint for server in servers]
        for server, retry_ms in zip(servers, retries_ms, strict=True):
            server.play([_idle(retry_ms, shards=urls)] * 20)
        yield servers


def _claim(client: StorageClient) -> int:
    answer = client.claim_tiering("w")
    assert isinstance(answer, TieringIdle)
    return answer.retry_after_ms


def test_every_shard_is_asked_and_the_soonest_counts() -> None:
    with _shards(700, 300, 500) as servers:
        with StorageClient(servers[0].endpoint) as client:
            assert [_claim(client) for _ in range(3)] == [300] * 3
        assert [len(server.requests) for server in servers] == [3, 3, 3]


def test_a_shard_that_is_gone_keeps_no_worker_from_the_others() -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    with ScriptedServer() as one, StorageClient(one.endpoint) as client:
        one.play([_idle(700, shards=[gone, one.endpoint])] * 20)
        assert [_claim(client) for _ in range(3)] == [700] * 3
        # Who answers in its place has answered for itself, too.
        assert len(one.requests) == 2 + 1 + 1


def test_a_service_of_one_process_is_asked_once() -> None:
    with ScriptedServer([_idle(500)] * 2) as alone, StorageClient(alone.endpoint) as client:
        assert [_claim(client), _claim(client)] == [500, 500]
        assert len(alone.requests) == 2
