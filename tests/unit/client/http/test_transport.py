"""Requests over kept connections to servers that close, stall, break off and lie."""

from __future__ import annotations

import json
import random
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from streamhouse.client import StorageClient
from streamhouse.client.http._connection_pool import (
    CONNECTIONS_KEPT_MAX,
    Node,
)
from streamhouse.client.http._http_connection import BrokenConnectionError
from streamhouse.client.http._stop_signal import StopSignal
from streamhouse.client.http._transport import HttpTransport
from streamhouse.client.http.endpoint import Endpoint
from streamhouse.core.errors import (
    InvalidRequestError,
    RequestTooLargeError,
    UnavailableError,
    UnknownOutcomeError,
)
from tests.support.certificates import Certificates, make_certificates
from tests.support.scripted_server import Act, ScriptedServer, read_request


def _answer(body: bytes, *, status: str = "200 OK", headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n%s\r\n%s" % (
        status.encode(),
        len(body),
        headers,
        body,
    )


def _refusal(code: str, status: str) -> bytes:
    return _answer(json.dumps({"error": {"code": code, "message": "no"}}).encode(), status=status)


OK: Final = _answer(b"ok")


def _transport(server: ScriptedServer, *, timeout_s: float = 5, token: str = "t") -> HttpTransport:
    return HttpTransport(server.endpoint, token=token, timeout_s=timeout_s)


def test_a_request_says_what_it_has_to() -> None:
    with ScriptedServer([OK, OK, OK]) as server:
        transport = _transport(server)
        transport.request("GET", "/v1/a b", query={"c": "d e&"}, is_repeatable=True)
        transport.request("POST", "/v1/x", is_repeatable=False)
        transport.request("POST", "/v1/x", body=b"rows", is_repeatable=False)
        transport.close()

    host = server.endpoint.removeprefix("http://")
    same = f"Host: {host}\r\nAccept-Encoding: identity\r\nAuthorization: Bearer t\r\n"
    assert [request.decode() for request in server.requests] == [
        f"GET /v1/a%20b?c=d+e%26 HTTP/1.1\r\n{same}\r\n",
        f"POST /v1/x HTTP/1.1\r\n{same}Content-Length: 0\r\n\r\n",
        f"POST /v1/x HTTP/1.1\r\n{same}Content-Type: application/vnd.apache.arrow.stream\r\n"
        "Content-Length: 4\r\n\r\nrows",
    ]
    assert server.connections == 1


def test_a_service_may_stand_below_a_path() -> None:
    with ScriptedServer([OK, OK]) as server:
        transport = HttpTransport(f"{server.endpoint}/lake \x0b/", token=None, timeout_s=60)
        transport.request("GET", "/v1/x", is_repeatable=True)
        transport.close()

    assert server.requests[0].startswith(b"GET /lake%20%0B/v1/x HTTP/1.1\r\nHost: ")


def test_no_name_and_no_token_ends_a_line() -> None:
    with ScriptedServer([_answer(b"{}")]) as server:
        with StorageClient(server.endpoint) as client:
            client.drop_database("a\r\nX-Evil: 1\r\n\r\n?#")
        with pytest.raises(InvalidRequestError, match="no HTTP header may have") as error:
            _transport(server, token="s3cret\r\nX: y")

    assert server.requests[0].startswith(
        b"DELETE /v1/databases/a%0D%0AX-Evil%3A%201%0D%0A%0D%0A%3F%23 HTTP/1.1\r\nHost: "
    )
    assert "s3cret" not in error.value.message


def test_a_connection_that_was_closed_meanwhile_is_not_used() -> None:
    closed = threading.Event()

    def close(opened: socket.socket) -> None:
        opened.close()
        closed.set()

    with ScriptedServer([OK, close], [OK]) as server:
        transport = _transport(server)
        transport.request("GET", "/", is_repeatable=True)
        closed.wait(60)
        # It is not to be repeated: a request that was sent to nobody would be lost.
        transport.request("POST", "/", is_repeatable=False)
        transport.close()

    assert server.connections == 2


@pytest.mark.parametrize("end", [Act.CLOSE, Act.RESET])
def test_a_request_whose_kept_connection_ends_is_repeated_at_once_if_it_may_be(end: Act) -> None:
    with ScriptedServer([OK, Act.LISTEN, end], [OK]) as server:
        transport = _transport(server)
        repeats: list[int] = []
        transport.request("GET", "/1", is_repeatable=True)
        transport.request(
            "POST", "/2", is_repeatable=True, on_repeat=lambda _: repeats.append(server.connections)
        )
        transport.close()

    assert [request.split(b" ")[1] for request in server.requests] == [b"/1", b"/2", b"/2"]
    assert repeats == [1]


@pytest.mark.parametrize("end", [Act.CLOSE, Act.RESET])
def test_a_request_that_may_have_been_read_is_not_sent_again(end: Act) -> None:
    with ScriptedServer([OK, Act.LISTEN, end], [OK]) as server:
        transport = _transport(server)
        transport.request("GET", "/1", is_repeatable=True)
        with pytest.raises(UnknownOutcomeError, match="did not answer POST /2: ") as error:
            transport.request("POST", "/2", is_repeatable=False)
        transport.close()

    assert isinstance(error.value.__cause__, BrokenConnectionError)
    assert [request.split(b" ")[1] for request in server.requests] == [b"/1", b"/2"]


@pytest.mark.parametrize("seed", range(30))
def test_what_breaks_off_anywhere_is_asked_for_again(seed: int) -> None:
    random_ = random.Random(seed)
    body = random_.randbytes(random_.choice([0, 10, 300_000]))
    whole = _answer(body)
    cut = whole[: random_.randrange(len(whole))]
    with ScriptedServer([OK, cut, random_.choice([Act.CLOSE, Act.RESET])], [whole]) as server:
        transport = _transport(server)
        transport.request("GET", "/", is_repeatable=True)

        assert transport.request("GET", "/", is_repeatable=True).data == body
        transport.close()


def test_a_service_never_seen_is_not_asked_twice() -> None:
    with ScriptedServer([Act.LISTEN]) as server:
        transport = _transport(server)
        with pytest.raises(UnknownOutcomeError, match="without an answer"):
            transport.request("GET", "/", is_repeatable=True)
        transport.close()

    # The second connection had a greeting of TLS only.
    assert server.connections == 2


def test_silence_is_an_error_within_the_time_out() -> None:
    with ScriptedServer([Act.LISTEN, Act.STALL]) as server:
        transport = _transport(server, timeout_s=0.05)
        with pytest.raises(UnknownOutcomeError, match=r"not a byte came for 0\.05 s"):
            transport.request("GET", "/", is_repeatable=True)
        transport.close()


def test_nobody_there_is_said_in_one_sentence() -> None:
    with ScriptedServer([OK]) as server:
        transport = _transport(server, timeout_s=0.1)
        transport.request("GET", "/", is_repeatable=True)
    sentence = r"cannot reach the Streamhouse service at http.*nobody listens at port \d+"
    with pytest.raises(UnavailableError, match=sentence) as raised:
        transport.request("GET", "/", is_repeatable=True)
    assert raised.value.__suppress_context__
    transport.close()


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (socket.gaierror(-2, "Name or service not known"), "the name '127.0.0.1' has no address"),
        (TimeoutError("timed out"), r"127.0.0.1 did not answer within \d+ s"),
        (OSError(101, "Network is unreachable"), "Network is unreachable"),
    ],
)
def test_the_ways_of_not_reaching_a_service_are_told_apart(
    error: OSError, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    with ScriptedServer([OK]) as server:
        transport = _transport(server, timeout_s=0.1)
        monkeypatch.setattr(socket, "create_connection", fail)
        with pytest.raises(UnavailableError, match=sentence):
            transport.request("GET", "/", is_repeatable=True)
        transport.close()


def test_a_refusal_of_a_large_body_is_heard() -> None:
    def refuse(opened: socket.socket) -> None:
        opened.recv(100)
        opened.sendall(_refusal("request_too_large", "413 Large"))
        opened.shutdown(socket.SHUT_RDWR)

    with ScriptedServer([refuse]) as server:
        transport = _transport(server)
        with pytest.raises(RequestTooLargeError):
            transport.request("POST", "/", body=bytes(32 << 20), is_repeatable=False)
        transport.close()


@pytest.mark.parametrize(
    ("body", "what"),
    [(b"<html>", "something that is no JSON"), (b'{"status": "ok"}', "without 'tables'")],
)
def test_the_answer_of_another_server_is_not_taken_for_one(body: bytes, what: str) -> None:
    with (
        ScriptedServer([_answer(body)]) as server,
        StorageClient(server.endpoint) as client,
        pytest.raises(InvalidRequestError, match=f"{what}; is it a Streamhouse service"),
    ):
        client.list_tables()


@pytest.mark.parametrize("status", ["301 Moved", "307 Other", "404 None", "500 Oh"])
def test_another_server_is_not_taken_for_a_service(status: str) -> None:
    other = _answer(b"<html>", status=status, headers=b"location: http://127.0.0.1:9/\r\n")
    with ScriptedServer([other, other]) as server:
        transport = _transport(server)
        with pytest.raises(InvalidRequestError, match="is it a Streamhouse service"):
            transport.request("GET", "/", is_repeatable=True)
        with pytest.raises(InvalidRequestError, match="is it a Streamhouse service"):
            transport.open_stream(
                server.endpoint, "/", query=None, silence_s_max=5, stop=StopSignal()
            )
        transport.close()


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with ScriptedServer([OK]) as server:
        transport = _transport(server)
        assert transport.request("GET", "/", is_repeatable=True).data == b"ok"
        transport.close()


def test_an_address_of_six_bytes_twice_and_more() -> None:
    try:
        server = ScriptedServer([OK], host="::1")
    except OSError:
        pytest.skip("needs IPv6")
    with server:
        transport = _transport(server)
        assert transport.request("GET", "/", is_repeatable=True).data == b"ok"
        transport.close()

    assert f"Host: {server.endpoint.removeprefix('http://')}\r\n".encode() in server.requests[0]


def _echo(opened: socket.socket) -> None:
    while True:
        opened.sendall(_answer(read_request(opened).split(b" ")[1]))


def test_many_threads_have_their_own_answers() -> None:
    failures: list[str] = []

    def ask(transport: HttpTransport, number: int) -> None:
        for turn in range(50):
            path = f"/{number}/{turn}"
            answer = transport.request("GET", path, is_repeatable=False).data
            if answer != path.encode():
                failures.append(f"{path}: {answer!r}")

    with ScriptedServer([_echo]) as server:
        transport = _transport(server, timeout_s=30)
        threads = [threading.Thread(target=ask, args=(transport, n)) for n in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        opened = server.connections
        for _ in range(2 * CONNECTIONS_KEPT_MAX):
            transport.request("GET", "/", is_repeatable=False)
        transport.close()

    assert not failures
    assert opened <= 32 * 50
    assert server.connections == opened


def test_a_forked_process_leaves_its_parents_connections_alone() -> None:
    program = """
import os, sys
from streamhouse.client.http._transport import HttpTransport
transport = HttpTransport(sys.argv[1], token=None, timeout_s=60)
transport.request("GET", "/parent", is_repeatable=False)
child = os.fork()
answer = transport.request("GET", f"/{child > 0}", is_repeatable=False)
assert answer.data == f"/{child > 0}".encode()
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert transport.request("GET", "/after", is_repeatable=False).data == b"/after"
"""
    with ScriptedServer([_echo]) as server:
        subprocess.run([sys.executable, "-c", program, server.endpoint], check=True, timeout=60)

    assert server.connections == 2


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"), host="IP:127.0.0.1")


def _server_context(made: Certificates) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made.certificate, made.key)
    return context


def _echo_body(opened: socket.socket) -> None:
    while True:
        opened.sendall(_answer(read_request(opened).partition(b"\r\n\r\n")[2]))


def test_large_bodies_go_both_ways_over_one_tls_connection(made: Certificates) -> None:
    body = random.Random(1).randbytes(9 << 20)
    with ScriptedServer([_echo_body], tls=_server_context(made)) as server:
        transport = HttpTransport(f"{server.endpoint}#ca={made.ca}", token=None, timeout_s=30)
        for sent in (b"", body, b"x", body):
            assert transport.request("POST", "/", body=sent, is_repeatable=False).data == sent
        transport.close()

    assert server.connections == 1


@pytest.mark.parametrize("end", [Act.CLOSE, Act.RESET])
def test_a_kept_tls_connection_that_ends_is_replaced(end: Act, made: Certificates) -> None:
    script = [OK, Act.LISTEN, end]
    with ScriptedServer(script, [OK], tls=_server_context(made)) as server:
        transport = HttpTransport(f"{server.endpoint}#ca={made.ca}", token=None, timeout_s=60)
        for _ in range(2):
            assert transport.request("GET", "/", is_repeatable=True).data == b"ok"
        transport.close()

    assert server.connections == 2


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda opened: opened.close(), "did not answer"),
        (lambda opened: opened.sendall(b"HTTP/1.1 400 Plain\r\n\r\n"), "does not speak TLS"),
    ],
    ids=["ends", "answers plainly"],
)
def test_a_server_without_tls_is_told_apart(
    act: Callable[[socket.socket], None], says: str
) -> None:
    def refuse(opened: socket.socket) -> None:
        opened.recv(100)
        act(opened)

    with ScriptedServer([refuse]) as server:
        transport = HttpTransport(server.endpoint.replace("http", "https"), token=None, timeout_s=9)
        with pytest.raises((InvalidRequestError, UnknownOutcomeError, UnavailableError)) as error:
            transport.request("GET", "/", is_repeatable=True)
        transport.close()

    assert says in error.value.message or isinstance(error.value, UnavailableError)


def test_a_fingerprint_may_be_any_text(made: Certificates) -> None:
    with ScriptedServer([OK], tls=_server_context(made)) as server:
        transport = HttpTransport(f"{server.endpoint}#sha256=é", token=None, timeout_s=60)
        with pytest.raises(InvalidRequestError, match="expected é, got"):
            transport.request("GET", "/", is_repeatable=True)
        transport.close()


@pytest.mark.parametrize(
    ("netloc", "said"),
    [("bücher.example:8765", b"xn--bcher-kva.example:8765"), ("a.bücher:1", b"a.xn--bcher-kva:1")],
)
def test_a_host_of_any_language_is_said_as_names_are(netloc: str, said: bytes) -> None:
    head = Node(Endpoint(url=f"http://{netloc}"), headers="").request_head(
        "GET", "/", content_type="", length=None
    )

    assert b"\r\nHost: " + said + b"\r\n" in head


def test_a_file_without_certificates_is_said_at_once(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("no certificate\n")

    with pytest.raises(InvalidRequestError, match=r"CA file .*ca\.pem cannot be used"):
        HttpTransport(f"https://127.0.0.1:1#ca={file}", token=None, timeout_s=1)
