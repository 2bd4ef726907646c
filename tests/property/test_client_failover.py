"""Whatever happens to requests and whoever is the owner: each row is stored once, nobody errs."""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.client import Producer, StorageClient
from streamhouse.core.backoff import Backoff
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from tests.support.examples import examples
from tests.support.free_ports import free_port
from tests.support.scripted_server import read_request

_DOWN_S: Final = 0.005
_REASONS: Final = {200: "OK", 421: "Misdirected", 503: "Later"}


class Fault(enum.Enum):
    """What happens to one request."""

    NONE = enum.auto()
    CUT_BEFORE = enum.auto()
    """The connection is reset, and nothing was done."""
    CUT_AFTER = enum.auto()
    """It is done, and the connection is reset without an answer."""
    CUT_IN_ANSWER = enum.auto()
    """It is done, and the connection is reset in the middle of the answer."""
    STARTING = enum.auto()
    OVERLOADED = enum.auto()
    DENIED = enum.auto()
    """`not_owner` without an owner, from whoever is asked."""
    SENT_ROUND = enum.auto()
    """`not_owner` that names the next process, from whoever is asked."""
    SENT_BACK = enum.auto()
    """`not_owner` that names whoever is asked."""
    SENT_TO_NOBODY = enum.auto()
    """`not_owner` that names an address at which nobody listens."""
    SENT_ASTRAY = enum.auto()
    """`not_owner` that names what is not followed."""
    DOWN = enum.auto()
    """The process is gone with all its connections, and comes back some milliseconds later."""


_SENT: Final = {
    Fault.SENT_ROUND: "",
    Fault.SENT_BACK: "",
    Fault.SENT_TO_NOBODY: "http://127.0.0.1:1",
    Fault.SENT_ASTRAY: "gopher://127.0.0.1:1",
}


@dataclass(frozen=True, slots=True)
class Turn:
    """What happens to a request, and who is the owner from before it on."""

    fault: Fault
    owner: int


class MovingService:
    """One log table over `processes` listeners; enter it, then give it a script.

    `stored` is bucket -> the ids of its rows, in offset order.
    """

    def __init__(self, table: TableInfo, *, processes: int) -> None:
        self._table = table
        self._processes = [_Process(self, number) for number in range(processes)]
        self._turns: Iterator[Turn] = iter(())
        self._owner = 0
        self._is_done: dict[tuple[str, int], dict[int, tuple[int, int]]] = defaultdict(dict)
        self._lock = threading.Lock()
        self.stored: dict[int, list[int]] = {b: [] for b in range(table.bucket_count)}
        self.turns_taken = 0

    def __enter__(self) -> MovingService:
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.stop()

    @property
    def endpoints(self) -> list[str]:
        """The URLs of the processes."""
        return [process.url for process in self._processes]

    def play(self, turns: Sequence[Turn]) -> None:
        """Do this from the next request on."""
        with self._lock:
            self._turns = iter(turns)

    def answer(self, process: int, request: bytes) -> tuple[bytes, Fault]:
        """Return the whole answer to a request, and what is to become of it."""
        with self._lock:
            turn = next(self._turns, None)
            fault = Fault.NONE
            if turn is not None:
                self.turns_taken += 1
                fault, self._owner = turn.fault, turn.owner
            if fault in (Fault.CUT_BEFORE, Fault.DOWN):
                return b"", fault
            if request.startswith(b"GET /health "):
                return _answer(200, {"service_id": "one"}), fault
            if fault is Fault.STARTING:
                return _refusal(503, "unavailable"), fault
            if fault is Fault.OVERLOADED:
                return _refusal(503, "overloaded"), fault
            if fault is Fault.DENIED:
                return _refusal(421, "not_owner", owner=None), fault
            if fault in _SENT:
                owner = _SENT[fault] or self.endpoints[process]
                if fault is Fault.SENT_ROUND:
                    owner = self.endpoints[(process + 1) % len(self._processes)]
                return _refusal(421, "not_owner", owner=owner), fault
            if process != self._owner:
                return _refusal(421, "not_owner", owner=self.endpoints[self._owner]), fault
            return _answer(200, self._served(request)), fault

    def _served(self, request: bytes) -> Any:
        head, _, body = request.partition(b"\r\n\r\n")
        target = urlsplit(head.split(b" ")[1].decode())
        if target.path.endswith("/append"):
            return {"buckets": self._append(parse_qs(target.query)["writer_id"][0], body)}
        if target.path.endswith("/count"):
            return {"count": sum(map(len, self.stored.values()))}
        return self._table.to_json()

    def _append(self, writer: str, body: bytes) -> dict[str, tuple[int, int]]:
        spans: dict[str, tuple[int, int]] = {}
        for bucket, sequence, rows in _batches(body):
            done = self._is_done[writer, bucket]
            if sequence not in done:
                assert sequence == len(done) + 1, f"{writer} skips to {sequence} of {bucket}"
                log = self.stored[bucket]
                done[sequence] = (len(log), len(log) + len(rows))
                log += rows
            spans[str(bucket)] = done[sequence]
        return spans


class _Process:
    """A listener that can go away and come back on its port."""

    def __init__(self, service: MovingService, number: int) -> None:
        self._service = service
        self._number = number
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._open: list[socket.socket] = []
        self._port = free_port()
        self._is_over = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        with self._lock:
            self._listener = socket.create_server(("127.0.0.1", self._port))
            threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def stop(self) -> None:
        """Go away for good."""
        self._is_over = True
        self._go()

    def _come_back(self) -> None:
        if self._listener is None and not self._is_over:
            self.start()

    def _go(self) -> None:
        with self._lock:
            listener, self._listener = self._listener, None
            if listener is not None:
                with contextlib.suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)
                listener.close()
            opened, self._open = self._open, []
        for connection in opened:
            _reset(connection)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                opened, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self._open.append(opened)
            threading.Thread(target=self._serve, args=(opened,), daemon=True).start()

    def _serve(self, opened: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                answer, fault = self._service.answer(self._number, read_request(opened))
                if fault is Fault.DOWN:
                    self._go()
                    threading.Timer(_DOWN_S, self._come_back).start()
                if fault in (Fault.CUT_BEFORE, Fault.CUT_AFTER, Fault.DOWN):
                    break
                if fault is Fault.CUT_IN_ANSWER:
                    opened.sendall(answer[: len(answer) // 2])
                    break
                opened.sendall(answer)
        _reset(opened)


def _batches(body: bytes) -> Iterator[tuple[int, int, list[int]]]:
    with pa.ipc.open_stream(body) as reader:
        for _ in itertools.count():
            try:
                batch, metadata = reader.read_next_batch_with_custom_metadata()
            except StopIteration:
                return
            ids = batch.column("id").to_pylist()
            yield int(metadata[b"bucket"]), int(metadata[b"sequence"]), ids


def _reset(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # A thread that reads from it is woken.
        opened.shutdown(socket.SHUT_RD)
    opened.close()


def _answer(status: int, value: Any) -> bytes:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _refusal(status: int, code: str, **members: Any) -> bytes:
    return _answer(status, {"error": {"code": code, "message": "no", **members}})


PROCESSES: Final = 3
SCHEMA: Final = pa.schema([pa.field("id", pa.int64(), nullable=False)])
TABLE: Final = TableInfo(
    descriptor=TableDescriptor(
        path=TablePath.parse("t"),
        schema=Schema.from_arrow(SCHEMA),
        bucket_count=2,
        bucket_key=("id",),
    ),
    table_id=1,
    created_at_us=0,
)

_turns = st.lists(
    st.builds(Turn, st.sampled_from(Fault), st.integers(0, PROCESSES - 1)), max_size=25
)
_listed = st.lists(st.integers(0, PROCESSES - 1), min_size=1, max_size=PROCESSES, unique=True)


@contextmanager
def _world(listed: list[int]) -> Iterator[tuple[MovingService, StorageClient]]:
    with MovingService(TABLE, processes=PROCESSES) as service:
        urls = ",".join(service.endpoints[number] for number in listed)
        with StorageClient(urls) as client:
            client.transport.routes.backoff = Backoff(first_s=0.0005, most_s=0.002)
            # Of one endpoint alone, a service that was never reached may be misspelt.
            client.describe_table("t")
            yield service, client


def _rows(start: int, end: int) -> pa.Table:
    return pa.table({"id": list(range(start, end))}, schema=SCHEMA)


@settings(max_examples=examples(60), deadline=None)
@given(listed=_listed, turns=_turns, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_each_row_of_each_append_is_stored_once_where_the_call_says(
    listed: list[int], turns: list[Turn], sizes: list[int]
) -> None:
    with _world(listed) as (service, client):
        service.play(turns)
        at = 0
        found: dict[tuple[int, int], set[int]] = {}
        for size in sizes:
            ranges = client.append("t", _rows(at, at + size))
            found[at, at + size] = {
                row for b, (start, end) in ranges.items() for row in service.stored[b][start:end]
            }
            at += size
            assert client.count("t") == at

    assert sorted(row for log in service.stored.values() for row in log) == list(range(at))
    for (start, end), stored in found.items():
        assert stored == set(range(start, end))


@settings(max_examples=examples(40), deadline=None)
@given(listed=_listed, turns=_turns)
def test_a_producer_goes_on_under_its_sequence(listed: list[int], turns: list[Turn]) -> None:
    with _world(listed) as (service, client):
        service.play(turns)
        with Producer(client, "t", linger_ms=0, batch_rows=3) as producer:
            futures = [producer.send(_rows(at, at + 2)) for at in range(0, 30, 2)]
        for future in futures:
            future.result(timeout=0)

    assert sorted(row for log in service.stored.values() for row in log) == list(range(30))
    for log in service.stored.values():
        assert log == sorted(log)
