"""What one process makes of another that does not answer it, or that it must not ask."""

from __future__ import annotations

import asyncio
import socket

import pytest

from streamhouse.core.errors import UnavailableError, UnknownOutcomeError
from streamhouse.storage_service.server.shards.peers import HttpPeers, PeerAnswer, PeerRequest
from tests.support.scripted_server import Act, ScriptedServer


def _ask(endpoint: str, method: str) -> PeerAnswer:
    peers = HttpPeers()
    try:
        return asyncio.run(peers.ask(endpoint, PeerRequest.of(method, "/iceberg/v1/x", [])))
    finally:
        peers.close()


def test_a_change_that_was_sent_and_not_answered_may_have_been_done() -> None:
    """An engine that is told 503 takes its commit for undone, and deletes the files of it."""
    with (
        ScriptedServer([Act.LISTEN, Act.RESET]) as server,
        pytest.raises(UnknownOutcomeError, match="did not answer"),
    ):
        _ask(server.endpoint, "POST")


def test_a_read_that_was_not_answered_may_be_asked_again() -> None:
    with (
        ScriptedServer([Act.LISTEN, Act.RESET]) as server,
        pytest.raises(UnavailableError, match="did not answer"),
    ):
        _ask(server.endpoint, "GET")


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_who_is_not_there_has_done_nothing(method: str) -> None:
    with ScriptedServer() as server:
        endpoint = server.endpoint

    with pytest.raises(UnavailableError, match="does not answer"):
        _ask(endpoint, method)


def test_a_token_is_never_handed_on_from_https_to_http() -> None:
    """A lease names the endpoint: whoever may write the bucket would be sent the tokens."""
    request = PeerRequest.of("GET", "/v1/status", [(b"authorization", b"Bearer secret")])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        peers = HttpPeers(is_tls=True)

        with pytest.raises(UnavailableError, match="has no TLS, and this one has"):
            asyncio.run(peers.ask(f"http://127.0.0.1:{listening.getsockname()[1]}", request))

        peers.close()
        with pytest.raises(BlockingIOError):
            listening.accept()
