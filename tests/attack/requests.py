"""Hostile requests to every route, and of Kafka and Iceberg clients, as every kind of caller.

What is judged: no request ends in a bug (`internal`, a traceback, no answer at all); nobody gets
what their grants do not give; a guarded table is untouched in log, keys and lake; no answer has a
secret of the service or bytes of a file; no code that a request names is run, no host that it
names is called, no file outside the data directory appears or changes.
"""

from __future__ import annotations

import asyncio
import http.client
import random
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from streamhouse.api.client import StreamhouseClient
from streamhouse.storage_service.server.access._grants import token_hash
from streamhouse.storage_service.server.routes import OPEN_PAGES, Answer
from tests.attack.hostile_requests import HostileRequests, quoted
from tests.attack.judge import Violation, judge_table
from tests.attack.kafka_requests import attack_kafka
from tests.attack.outside_commits import attack_lake
from tests.attack.world import ROWS, SERVICE_OPTIONS, AttackedTable, key_rows
from tests.support.in_process_service import ROUTE_TABLE
from tests.support.kafka_world import request_bytes
from tests.support.pipelined import send_without_reading
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

__all__ = ["RequestReport", "attack_requests"]

_ANSWER_WAIT_S: Final = 60.0
_CANARY: Final = "canary-9c1f"
"""Part of every secret of the service under attack, and of no request."""
_OWNER: Final = f"owner-{_CANARY}"
_GUARDED: Final = ("guarded", "guarded_keys")
_OPEN: Final = ("open", "open_keys")

# Caller -> token (None: none is sent) and grants (None: it has no entry).
_CALLERS: Final[Mapping[str, tuple[str | None, str | None]]] = {
    "owner": (_OWNER, None),
    "nobody": (None, None),
    "stranger": ("wrong", None),
    "reader": ("reader-token", '"read:default.open", "read:default.open_keys"'),
    "writer": ("writer-token", '"write:default.open", "write:default.open_keys"'),
    "other": ("other-token", '"admin:elsewhere.*"'),
    "worker": ("worker-token", '"write:service", "read:default.open"'),
}
_KAFKA: Final = ("--kafka-port", "0")
_UNREAD_BYTES_MAX: Final = 128 << 20
_SEES_ALL: Final = ("owner", "worker")
_PUBLIC: Final = frozenset(("/health", "/ready", *OPEN_PAGES))


@dataclass
class RequestReport:
    """How many requests of which callers were answered how."""

    requests: int = 0
    statuses: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """Return a line a caller."""
        callers = sorted({name.split()[0] for name in self.statuses})
        return [
            f"  {caller}: "
            + ", ".join(
                f"{count} {name.split()[1]}"
                for name, count in sorted(self.statuses.items())
                if name.split()[0] == caller
            )
            for caller in callers
        ]


def attack_requests(
    place: Path, chance: random.Random, report: RequestReport, requests_each: int
) -> None:
    """Send `requests_each` requests per route; raises `Violation` for the first wrong answer."""
    place.mkdir()
    outside = place / "outside"
    options = _secret_files(outside)
    secrets = {"AWS_SESSION_TOKEN": f"aws-{_CANARY}", "AWS_SECRET_ACCESS_KEY": f"key-{_CANARY}"}
    before = _contents(outside)
    with (
        _Listener() as listener,
        ServiceProcess(place / "data", *options, env=secrets) as service,
        StreamhouseClient(service.endpoint, token=_OWNER) as owner,
    ):
        guarded = _make_tables(owner)
        attack = _Attack(service.endpoint, place, listener.endpoint, chance, report)
        for _ in range(requests_each):
            for route in attack.routes:
                attack.send(*route)
        report.requests += asyncio.run(
            attack_kafka(
                service.kafka_address,
                chance,
                tokens={caller: token for caller, (token, _) in _CALLERS.items()},
                topics={c: _OPEN if c == "owner" else (*_GUARDED, *_OPEN) for c in _CALLERS},
                hidden={c: b"guarded" for c in _CALLERS if c not in _SEES_ALL},
                secret=_CANARY.encode(),
                requests_each=requests_each,
                statuses=report.statuses,
            )
        )
        report.requests += attack_lake(
            f"{service.endpoint}/iceberg",
            tuple(f"default.{name}" for name in _GUARDED),
            chance,
            tokens={caller: token for caller, (token, _) in _CALLERS.items() if token},
            owner="owner",
            commits=requests_each,
            statuses=report.statuses,
        )
        _pipeline(service, owner, chance, report)
        _judge_service(service, owner, guarded)
        if listener.calls:
            raise Violation(f"the service called a host that a request named: {listener.calls}")
    if (place / "executed").exists():
        raise Violation("code that a request named was run")
    if _contents(outside) != before:
        raise Violation("files outside the data directory changed")
    if {path.name for path in place.iterdir()} != {"data", "outside"}:
        raise Violation(f"files appeared: {sorted(place.iterdir())}")
    shutil.rmtree(place)


def _pipeline(
    service: ServiceProcess, owner: StreamhouseClient, chance: random.Random, report: RequestReport
) -> None:
    """Send many requests over each of some connections that read no answer."""
    before = service.anonymous_bytes
    address = chance.choice((urlsplit(service.endpoint).netloc, service.kafka_address))
    request = request_bytes(18, 0, {})
    if address != service.kafka_address:
        path = chance.choice(("/health", "/v1/tables", "/nowhere", "/iceberg/v1/config"))
        request = f"GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode()
    requests = [request] * 3
    host, _, port = address.rpartition(":")
    send_without_reading(
        (host, int(port)), requests, between=lambda: owner.describe_table(_GUARDED[0])
    )
    report.requests += len(requests)
    grown = service.anonymous_bytes - before
    if grown > _UNREAD_BYTES_MAX:
        raise Violation(f"clients that read nothing took {grown:,} bytes: {requests[0]!r}")


def _judge_service(
    service: ServiceProcess, owner: StreamhouseClient, guarded: list[AttackedTable]
) -> None:
    if service.has_ended():
        raise Violation("the service has ended")
    logged = service.log_text()
    for sign in ("Traceback (most recent call last)", "code=internal"):
        if sign in logged:
            raise Violation(f"the service logged {logged[logged.index(sign) - 500 :][:3_000]}")
    for table in guarded:
        verdict = judge_table(owner, table, is_written=True, token=_OWNER)
        if verdict.refusals:
            raise Violation(f"{table.path}: {verdict.refusals[0]}")


def _secret_files(folder: Path) -> tuple[str, ...]:
    """Write the files of tokens and grants; return the options that name them."""
    folder.mkdir()
    token, grants = folder / "token", folder / "grants.toml"
    token.write_text(_OWNER + "\n")
    grants.write_text(
        "".join(
            f'[[token]]\nname = "{name}"\nsha256 = "{token_hash(given.encode())}"\n'
            f"grants = [{granted}]\n"
            for name, (given, granted) in _CALLERS.items()
            if granted is not None and given is not None
        )
    )
    for file in (token, grants):
        file.chmod(0o600)
    return (*SERVICE_OPTIONS, *_KAFKA, "--token-file", str(token), "--grants", str(grants))


def _make_tables(owner: StreamhouseClient) -> list[AttackedTable]:
    made = []
    for name in (*_GUARDED, *_OPEN):
        table = AttackedTable(f"default.{name}", is_keyed=name.endswith("keys"))
        owner.create_table(
            table.path, ROWS, primary_key=["id"] if table.is_keyed else [], bucket_count=2
        )
        for start in (0, 50):
            rows = key_rows(range(start, start + 50), name)
            (owner.upsert if table.is_keyed else owner.append)(table.path, rows)
            table.put(rows)
            tier_once(owner, table.path, token=_OWNER)
        made.append(table)
    return made[: len(_GUARDED)]


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class _Listener:
    """A host that requests name; nobody may call it."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.calls: list[bytes] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> _Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with closing(connection):
                connection.settimeout(2)
                try:
                    self.calls.append(connection.recv(4_096))
                except OSError:
                    self.calls.append(b"")


_CATALOG_ROUTES: Final = (
    ("GET", "/config"),
    ("GET", "/namespaces"),
    ("POST", "/namespaces"),
    ("POST", "/namespaces/{id}/properties"),
    ("DELETE", "/namespaces/{id}"),
    ("POST", "/namespaces/default/tables"),
    ("POST", "/namespaces/default/register"),
    ("POST", "/transactions/commit"),
    ("POST", "/tables/rename"),
    ("GET", "/namespaces/default/tables/{table}"),
    ("POST", "/namespaces/default/tables/{table}"),
    ("DELETE", "/namespaces/default/tables/{table}"),
    ("GET", "/namespaces/default/tables/{table}/credentials"),
    ("POST", "/namespaces/default/tables/{table}/metrics"),
    ("GET", "/live/namespaces"),
    ("GET", "/live/namespaces/{id}"),
    ("GET", "/live/namespaces/default/tables"),
    ("GET", "/live/namespaces/default/tables/{table}"),
    ("HEAD", "/live/namespaces/default/tables/{table}"),
    ("GET", "/live/namespaces/default/tables/{table}/credentials"),
    ("POST", "/live/namespaces/default/tables/{table}"),
    ("POST", "/live/namespaces/default/tables/{table}/plan"),
    ("POST", "/live/namespaces/default/tables/{table}/tasks"),
    ("POST", "/live/namespaces/default/tables"),
    ("DELETE", "/live/namespaces/default/tables/{table}"),
    ("POST", "/namespaces/default/tables/{table}/plan"),
    ("DELETE", "/namespaces/default/tables/{table}/plan/{id}"),
    ("POST", "/namespaces/default/tables/{table}/tasks"),
)


def _service_routes() -> Iterator[tuple[str, str]]:
    """Yield every route of the service but the catalog's, its parameters as `send` fills them."""
    for route in ROUTE_TABLE.rows:
        if route.answer in (Answer.PROCESS, Answer.DATA, Answer.CONTROL, Answer.PAGES):
            path = route.path.replace("{path}", "{table}").replace("/...", "/{id}")
            path = path.replace("{bucket}", "0").replace("{holder}", "me")
            path = path.replace("{name}", "{id}").replace("{transaction_id}", "{id}")
            for method in route.method.split(", "):
                yield method, path


class _Attack:
    """Sends requests and judges their answers."""

    def __init__(
        self,
        endpoint: str,
        place: Path,
        listener: str,
        chance: random.Random,
        report: RequestReport,
    ) -> None:
        self._address = urlsplit(endpoint).netloc
        self._chance = chance
        self._drawn = HostileRequests(chance, place, listener)
        self._report = report
        self.routes = (
            *_service_routes(),
            *((method, f"/iceberg/v1{rest}") for method, rest in _CATALOG_ROUTES),
            ("GET", "/nowhere"),
        )

    def send(self, method: str, route: str) -> None:
        """Send one request to a route, as somebody."""
        chance = self._chance
        caller = chance.choice(sorted(_CALLERS))
        # The owner may do everything to every table: it is kept from the guarded ones.
        names = _OPEN if caller == "owner" else (*_GUARDED, *_OPEN)
        table = chance.choice((*names, *names, "nothing", self._drawn.name()))
        path = route.replace("{table}", quoted(table)).replace(
            "{id}", quoted(chance.choice(("1", "x", self._drawn.name())))
        )
        body, content_type = self._drawn.body(route, caller)
        query = self._drawn.query()
        headers = self._headers(caller, content_type, body)
        said = f"{caller}: {method} {path[:200]}{query[:200]}, body {body[:300]!r}"
        status, answer = self._exchange(method, path + query, headers, body, said)
        self._report.requests += 1
        self._report.statuses[f"{caller} {status // 100}xx"] += 1
        self._judge(caller, route, table, status, answer, said)

    def _judge(
        self, caller: str, route: str, table: str, status: int, answer: bytes, said: str
    ) -> None:
        text = answer.decode("utf-8", "replace")
        shown = f"{said}: {status} {text[:1_000]}"
        if _CANARY in text:
            raise Violation(f"an answer has a secret: {shown}")
        if "root:x:" in text or "Traceback" in text:
            raise Violation(f"an answer has what it may not have: {shown}")
        if status >= 500 and '"retriable":true' not in text.replace(" ", ""):
            raise Violation(f"a bug: {shown}")
        if status >= 400 and len(text) > 8_000:
            raise Violation(f"an error of {len(text)} characters: {shown}")
        is_public = route in _PUBLIC
        if status < 300 and caller in ("nobody", "stranger") and not is_public:
            raise Violation(f"somebody without a token got in: {shown}")
        if status < 300 and table in _GUARDED and "{table}" in route and caller != "owner":
            raise Violation(f"somebody got at a guarded table: {shown}")
        # Who may not read a table does not see that it exists; tiering is of the whole service.
        is_blind = caller not in _SEES_ALL and not is_public
        if status < 300 and is_blind and any(name in text for name in _GUARDED):
            raise Violation(f"somebody saw a guarded table: {shown}")

    def _exchange(
        self, method: str, path: str, headers: dict[str, str], body: bytes, said: str
    ) -> tuple[int, bytes]:
        host, _, port = self._address.partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=_ANSWER_WAIT_S)
        with closing(connection):
            try:
                connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
                for name, value in headers.items():
                    connection.putheader(name, value)
                connection.endheaders(body or None)
            except (ConnectionError, ValueError, http.client.InvalidURL):
                # It may answer before it has read everything.
                pass
            try:
                answer = connection.getresponse()
                # A subscription goes on; what it begins with is enough.
                content = answer.read1(65_536) if "subscribe" in path else answer.read()
            except TimeoutError as error:
                if "subscribe" in path:
                    return 200, b""
                raise Violation(f"no answer: {said}") from error
            except (http.client.HTTPException, ConnectionError) as error:
                if len(body) > 100_000 or "\n" in path or " " in path:
                    return 400, b""
                raise Violation(f"no answer: {said}: {error!r}") from error
            return answer.status, content

    def _headers(self, caller: str, content_type: str, body: bytes) -> dict[str, str]:
        chance = self._chance
        headers = {"Host": self._address}
        token = _CALLERS[caller][0]
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        if body:
            headers["Content-Length"] = str(len(body))
            headers["Content-Type"] = content_type
        if chance.random() < 0.1:
            name, value = chance.choice(
                (
                    ("Host", "evil.example"),
                    ("Origin", "http://evil.example"),
                    ("Content-Type", "text/plain"),
                    ("X-Request-Id", "x" * 5_000),
                    ("X-Streamhouse-Via", ",".join(["a"] * 500)),
                    ("X-Iceberg-Access-Delegation", "vended-credentials"),
                    ("Accept-Encoding", "gzip, br, zstd"),
                    ("Expect", "100-continue"),
                    ("Range", "bytes=0-"),
                    ("Transfer-Encoding", "gzip"),
                )
            )
            headers[name] = value
        return headers
