"""One connection, against answers of every form, cut at every byte and split at any."""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import FrameType
from typing import Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamhouse.client.http._http_connection import (
    HEAD_BYTES_MAX,
    BrokenConnectionError,
    Connection,
)
from tests.support.examples import examples

REQUEST: Final = b"GET / HTTP/1.1\r\n\r\n"
BODY: Final = bytes(range(256))
LENGTH: Final = b"HTTP/1.1 200 OK\r\ndate: now\r\ncontent-length: 256\r\n\r\n" + BODY
CHUNKED: Final = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"%x;a=b\r\n%s\r\n" % (8, BODY[at : at + 8]) for at in range(0, 256, 8))
    + b"0\r\nTrailer: said\r\n\r\n"
)
ENDLESS: Final = b"HTTP/1.1 200 OK\r\nserver: old\r\n\r\n" + BODY

ANSWERS: Final = {
    "length": (LENGTH, True),
    "chunked": (CHUNKED, True),
    "no length": (ENDLESS, False),
    "1.0": (LENGTH.replace(b"1.1", b"1.0", 1), False),
    "1.0 kept": (LENGTH.replace(b"1.1 200 OK", b"1.0 200 OK\r\nConnection: keep-alive", 1), True),
    "1.0 no length": (ENDLESS.replace(b"1.1", b"1.0", 1), False),
    "close": (LENGTH.replace(b"date: now", b"connection: close"), False),
    "interim": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 On it\r\nx: y\r\n\r\n" + LENGTH, True),
}
"""Name -> an answer with the body `BODY`, and whether its connection may be kept."""

REFUSED: Final = {
    "tls": b"\x15\x03\x01\x00\x02\x02F",
    "text": b"SSH-2.0-OpenSSH_9.2\r\n",
    "version": b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n",
    "status": b"HTTP/1.1 000 OK\r\ncontent-length: 0\r\n\r\n",
    "lines": b"HTTP/1.1 200 OK\ncontent-length: 0\n\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
    "length and chunks": (
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "negative": b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    "beyond 64 bits": b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (1 << 64),
    "compressed": b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 0\r\n\r\n",
    "transfer": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
    "another protocol": b"HTTP/1.1 101 Switch\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    "chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "nul": b"HTTP/1.1 200 OK\r\na: \x00\r\n\r\n",
}


@pytest.fixture
def ends() -> Iterator[tuple[Connection, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    theirs.settimeout(60)
    connection = Connection(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


class SplitSocket(socket.socket):
    """A socket that is given what comes, in pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        super().__init__(socket.AF_UNIX)
        self.pieces = [piece for piece in pieces if piece]

    def sendall(self, data: object, flags: int = 0) -> None:
        pass

    def recv(self, size: int, flags: int = 0) -> bytes:
        if not self.pieces:
            return b""
        piece, self.pieces[0] = self.pieces[0][:size], self.pieces[0][size:]
        if not self.pieces[0]:
            del self.pieces[0]
        return piece

    def recv_into(  # type: ignore[override]  # a view is all that is ever given
        self, buffer: memoryview, size: int = 0, flags: int = 0
    ) -> int:
        piece = self.recv(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


@pytest.mark.parametrize("form", ANSWERS)
def test_an_answer_is_read_whole(form: str, ends: tuple[Connection, socket.socket]) -> None:
    connection, service = ends
    data, may_keep = ANSWERS[form]
    service.sendall(data)
    service.shutdown(socket.SHUT_WR)

    answer, is_kept = connection.exchange(REQUEST, None, timeout_s=60)

    assert (answer.status, bytes(answer.data), is_kept) == (200, BODY, may_keep)
    assert service.recv(1 << 16) == REQUEST


@pytest.mark.parametrize("form", ANSWERS)
@settings(max_examples=examples(50))
@given(chosen=st.sets(st.integers(1, 2_000), max_size=12))
@example(chosen=set(range(2_000)))
def test_how_an_answer_is_split_makes_no_difference(form: str, chosen: set[int]) -> None:
    data, may_keep = ANSWERS[form]
    cuts = [0, *sorted({at % len(data) for at in chosen} - {0}), len(data)]
    with SplitSocket([data[a:b] for a, b in pairwise(cuts)]) as split:
        answer, is_kept = Connection(split).exchange(REQUEST, None, timeout_s=60)

    assert (answer.status, bytes(answer.data), is_kept) == (200, BODY, may_keep)


@pytest.mark.parametrize("form", ANSWERS)
def test_an_answer_cut_at_any_byte_is_no_answer(form: str) -> None:
    data, _ = ANSWERS[form]
    head_bytes = data.index(BODY[:8])
    for end in range(len(data)):
        with SplitSocket([data[:end]]) as split:
            connection = Connection(split)
            if "no length" in form and end >= head_bytes:
                # Nothing in it says how much there should have been.
                answer, is_kept = connection.exchange(REQUEST, None, timeout_s=60)
                assert (bytes(answer.data), is_kept) == (BODY[: end - head_bytes], False)
                continue
            with pytest.raises(BrokenConnectionError, match="the connection ended") as error:
                connection.exchange(REQUEST, None, timeout_s=60)
            assert not error.value.is_stale


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_answer_is_refused(what: str) -> None:
    with (
        SplitSocket([REFUSED[what]]) as split,
        pytest.raises(BrokenConnectionError, match="the answer is no HTTP: "),
    ):
        Connection(split).exchange(REQUEST, None, timeout_s=60)


@settings(max_examples=examples(200))
@given(
    form=st.sampled_from([LENGTH, CHUNKED]),
    changes=st.lists(st.tuples(st.integers(0, 2_000), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_garbage_is_refused_or_read_but_never_believed(
    form: bytes, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(form)
    for at, byte in changes:
        data[at % len(data)] = byte
    with SplitSocket([bytes(data)]) as split:
        connection = Connection(split)
        try:
            answer, _ = connection.exchange(REQUEST, None, timeout_s=60)
        except BrokenConnectionError:
            return
    assert 200 <= answer.status <= 999


@pytest.mark.parametrize(
    ("before", "again"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"a: %s\r\n" % (b"x" * 1000)),
        (b"HTTP/1.1 200 OK\r\na: ", b"x" * 1000),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 50),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\na: ", b"x" * 1000),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"a: x\r\n" * 100),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;", b"x" * 1000),
    ],
    ids=["headers", "header", "interim answers", "trailer", "trailers", "chunk extension"],
)
def test_a_head_has_an_end(before: bytes, again: bytes) -> None:
    with SplitSocket([before, *[again] * (4 * HEAD_BYTES_MAX // len(again))]) as split:
        with pytest.raises(BrokenConnectionError, match=f"more than {HEAD_BYTES_MAX} bytes"):
            Connection(split).exchange(REQUEST, None, timeout_s=60)

        assert split.pieces, "it was read to the end"


def test_many_small_chunks_are_no_long_head() -> None:
    count = 100_000
    data = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%s0\r\n\r\n" % (
        b"0001\r\nx\r\n" * count
    )
    with SplitSocket([data]) as split:
        answer, _ = Connection(split).exchange(REQUEST, None, timeout_s=60)

    assert answer.data == b"x" * count


def test_a_long_body_is_not_waited_for_in_memory() -> None:
    """What an answer claims to be is not taken before it comes."""
    with (
        SplitSocket([b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\nabc" % (1 << 60)]) as split,
        pytest.raises(BrokenConnectionError, match="in the middle of the answer"),
    ):
        Connection(split).exchange(REQUEST, None, timeout_s=60)


def test_a_body_of_several_steps_is_one() -> None:
    body = bytes(range(251)) * (40 << 20 >> 8)
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
    with SplitSocket([head + body[:100], body[100:]]) as split:
        answer, is_kept = Connection(split).exchange(REQUEST, None, timeout_s=60)

    assert answer.data == body
    assert is_kept


@pytest.mark.parametrize("more", [b"HTTP/1.1 200 OK\r\n", b"garbage", LENGTH])
def test_what_nobody_asked_for_ends_the_connection(
    more: bytes, ends: tuple[Connection, socket.socket]
) -> None:
    connection, service = ends
    service.sendall(LENGTH + more)

    answer, is_kept = connection.exchange(REQUEST, None, timeout_s=60)

    assert answer.data == BODY
    assert not is_kept


def test_a_kept_connection_knows_that_it_is_over(
    ends: tuple[Connection, socket.socket],
) -> None:
    connection, service = ends
    assert connection.is_usable()
    service.sendall(LENGTH)
    connection.exchange(REQUEST, None, timeout_s=60)
    assert connection.is_usable()

    service.sendall(b"HTTP/1.1 408 Too slow\r\n")

    assert not connection.is_usable()


def test_a_connection_that_ends_unheard_is_stale_only_when_it_was_kept(
    ends: tuple[Connection, socket.socket],
) -> None:
    connection, service = ends
    service.sendall(LENGTH)
    connection.exchange(REQUEST, None, timeout_s=60)
    service.close()

    with pytest.raises(BrokenConnectionError, match="without an answer") as error:
        connection.exchange(REQUEST, None, timeout_s=60)

    assert error.value.is_stale


@pytest.mark.parametrize("some", [b"", b"HTTP/1.1 2", LENGTH[:-1]])
def test_silence_ends(some: bytes, ends: tuple[Connection, socket.socket]) -> None:
    connection, service = ends
    service.sendall(some)

    with pytest.raises(BrokenConnectionError, match=r"not a byte came for 0\.01 s") as error:
        connection.exchange(REQUEST, None, timeout_s=0.01)

    assert not error.value.is_stale


def test_a_request_that_nobody_takes_ends(ends: tuple[Connection, socket.socket]) -> None:
    connection, _ = ends

    with pytest.raises(BrokenConnectionError, match=r"did not take the request in 0\.01 s"):
        connection.exchange(REQUEST, bytes(64 << 20), timeout_s=0.01)


def test_a_refusal_is_heard_although_the_request_was_not_taken(
    ends: tuple[Connection, socket.socket],
) -> None:
    connection, service = ends
    service.sendall(LENGTH.replace(b"200 OK", b"413 Too large"))
    service.shutdown(socket.SHUT_RD)

    answer, is_kept = connection.exchange(REQUEST, bytes(64 << 20), timeout_s=60)

    assert (answer.status, answer.data, is_kept) == (413, BODY, False)


@pytest.mark.parametrize("form", ["length", "chunked", "no length"])
@settings(max_examples=examples(50))
@given(seed=st.integers(0, 1 << 32))
def test_a_stream_is_read_in_any_steps(form: str, seed: int) -> None:
    data, _ = ANSWERS[form]
    random_ = random.Random(seed)
    cuts = [0, *sorted(random_.sample(range(1, len(data)), 20)), len(data)]
    with SplitSocket([data[a:b] for a, b in pairwise(cuts)]) as split:
        status, stream = Connection(split).open_stream(REQUEST, timeout_s=60)
        read: list[bytes] = []
        with stream:
            while sum(map(len, read)) < len(BODY):
                size = random_.choice([0, 1, 2, 8, 100])
                read.append(stream.read(size))
                assert len(read[-1]) == min(size, len(BODY) - sum(map(len, read[:-1])))
            assert stream.read(5) == b""
            assert stream.read() == b""
        assert stream.closed

    assert (status, b"".join(read)) == (200, BODY)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, TimeoutError, ValueError])
@pytest.mark.parametrize("callback", ["on_header", "on_headers_complete", "on_message_complete"])
def test_what_a_signals_handler_raises_is_no_fault_of_the_answer(
    callback: str, raised: type[BaseException]
) -> None:
    interrupt = raised("a signal came")

    def handle(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == callback:
            raise interrupt

    # It raises where the handler of a signal would.
    sys.setprofile(handle)
    try:
        with SplitSocket([LENGTH]) as split, pytest.raises(raised) as error:
            Connection(split).exchange(REQUEST, None, timeout_s=60)
    finally:
        sys.setprofile(None)

    assert error.value is interrupt


def test_what_the_caller_handles_is_no_fault_of_the_answer() -> None:
    with SplitSocket([REFUSED["version"]]) as split:
        try:
            raise RuntimeError("the caller's")
        except RuntimeError:
            with pytest.raises(BrokenConnectionError, match="is no HTTP: its version"):
                Connection(split).exchange(REQUEST, None, timeout_s=60)


def test_a_closed_stream_is_read_no_more() -> None:
    with SplitSocket([LENGTH]) as split:
        _, stream = Connection(split).open_stream(REQUEST, timeout_s=60)
        stream.close()

        with pytest.raises(BrokenConnectionError, match="the answer was closed"):
            stream.read(1)


def test_a_stream_that_breaks_off_says_so() -> None:
    with SplitSocket([CHUNKED[:-2]]) as split:
        _, stream = Connection(split).open_stream(REQUEST, timeout_s=60)

        assert stream.read(len(BODY)) == BODY
        with pytest.raises(BrokenConnectionError, match="in the middle of the answer"):
            stream.read(1)
        stream.close()
