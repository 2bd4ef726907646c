"""Lookups that a standby answers: never older than what the client asks for, through takeovers."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from streamhouse.client import StorageClient
from tests.support.journal_machines import JournalHome, Machine, Pair, StoreKind
from tests.support.linearizability import Call, History, find_contradiction
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

KEYED = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.int64())])
LEASE_MS = 1_500
ARGUMENTS = ("--lease-ms", str(LEASE_MS), "--journal-linger-ms", "2")


class _Row(NamedTuple):
    status: int
    role: str | None
    body: Any


@pytest.fixture
def store() -> StoreKind:
    """The store of the journal; a test may name another one."""
    return "file"


@pytest.fixture
def pair(tmp_path: Path, store: StoreKind) -> Iterator[Pair]:
    """Return an owner and a standby, `machines[0]` and `machines[1]`."""
    with JournalHome(store, folder=tmp_path / "home") as home, Pair(home, *ARGUMENTS) as pair:
        owner, standby = pair.machines
        owner.start()
        owner.wait_until_owner(60)
        standby.start("--standby")
        yield pair


def _row(
    machine: Machine, key: int, least: Mapping[int, int] | None, *, table: str = "keyed"
) -> _Row:
    """Get a row of one process, with `at_least` unless it is None."""
    query = ""
    if least is not None:
        query = f"?table_id={_table_id(machine, table)}&at_least={json.dumps(dict(least))}"
    connection = http.client.HTTPConnection("127.0.0.1", machine.port, timeout=30)
    try:
        connection.request("GET", f"/v1/tables/{table}/rows/{key}{query.replace(' ', '')}")
        answer = connection.getresponse()
        return _Row(answer.status, answer.headers["x-role"], json.loads(answer.read()))
    finally:
        connection.close()


_IDS: dict[tuple[int, str], int] = {}


def _table_id(machine: Machine, table: str) -> int:
    return _IDS[id(machine.home), table]


def _create(pair: Pair, client: StorageClient, table: str = "keyed", **more: Any) -> None:
    info = client.create_table(table, KEYED, primary_key=["id"], **more)
    _IDS[id(pair.machines[0].home), table] = info.table_id


def _rows(values: Mapping[int, int]) -> pa.Table:
    return pa.table({"id": list(values), "value": list(values.values())}, schema=KEYED)


def _ends(client: StorageClient, table: str = "keyed") -> dict[int, int]:
    return {bucket: int(at.high_watermark) for bucket, at in client.positions(table).items()}


def test_a_standby_answers_what_names_the_least_and_nothing_else(pair: Pair) -> None:
    owner, standby = pair.machines
    with StorageClient(owner.endpoint) as client:
        _create(pair, client, bucket_count=3)
        client.upsert("keyed", _rows({key: key for key in range(50)}))
        ends = _ends(client)
        wait_until(lambda: _row(standby, 7, ends).status == 200, "an answer of the standby")

        assert _row(standby, 7, ends) == (200, "standby", {"id": 7, "value": 7})
        assert _row(standby, 7, {}).body == {"id": 7, "value": 7}
        assert (_row(standby, 77, ends).status, _row(standby, 77, ends).role) == (404, "standby")
        assert _row(standby, 7, None).status == 421
        assert _row(standby, 7, {0: 10**6}).body["error"]["owner"] == owner.endpoint
        assert _row(standby, 7, {3: 0}).status == 421, "the owner refuses what is wrong"
        assert _row(owner, 7, {3: 0}).status == 400
        assert _row(owner, 7, ends) == (200, None, {"id": 7, "value": 7})
        assert _row(owner, 7, {0: 10**6}).body["error"]["code"] == "log_cut"


def test_its_lookups_are_those_of_the_owner_in_every_form_of_the_table(pair: Pair) -> None:
    """Writes, deletes, transactions, an overwrite, another schema, a drop and a new table."""
    owner, standby = pair.machines
    random, expected = Random(7), dict[int, int]()

    def compare() -> None:
        ends = _ends(client)
        wait_until(lambda: _row(standby, 0, ends).status != 421, "the standby follows")
        for key in range(40):
            answer, wanted = _row(standby, key, ends), expected.get(key)
            assert answer.role == "standby"
            assert answer.body.get("value") == wanted, (key, answer)

    with StorageClient(owner.endpoint) as client:
        for _ in range(2):
            _create(pair, client, bucket_count=4)
            for number in range(12):
                keys = random.sample(range(40), random.randint(1, 20))
                rows = _rows({key: 100 * number + key for key in keys})
                if number % 3 == 0:
                    client.delete("keyed", rows.select(["id"]))
                    expected = {k: v for k, v in expected.items() if k not in keys}
                elif number % 3 == 1:
                    operation = "overwrite" if number == 7 else "upsert"
                    with client.begin_transaction("keyed", operation=operation) as transaction:
                        transaction.commit([transaction.stage(rows)])
                    former = {} if operation == "overwrite" else expected
                    expected = {**former, **{key: 100 * number + key for key in keys}}
                else:
                    client.upsert("keyed", rows)
                    expected |= {key: 100 * number + key for key in keys}
                compare()
            client.alter_schema("keyed", [{"add": "more", "type": "bigint"}])
            client.upsert("keyed", [{"id": 1, "value": -1, "more": 5}])
            expected[1] = -1
            compare()
            assert _row(standby, 1, _ends(client)).body["more"] == 5
            client.drop_table("keyed")
            expected.clear()


def test_a_client_reads_its_own_writes_from_any_process(pair: Pair) -> None:
    _, standby = pair.machines
    with StorageClient(pair.endpoint, read_from="any") as client:
        _create(pair, client, bucket_count=2)
        for number in range(200):
            key = number % 10
            client.upsert("keyed", [{"id": key, "value": number}])
            assert client.lookup_one("keyed", id=key) == {"id": key, "value": number}
            found = client.lookup("keyed", [{"id": key}, {"id": 99}]).to_pylist()
            assert [row["value"] for row in found] == [number, None]
            assert _under(client, key) == {"id": key, "value": number}
        wait_until(
            lambda: [client.lookup_one("keyed", id=1) for _ in range(5)] and _answers(standby) > 50,
            "lookups that the standby answers",
        )
        wait_until(
            lambda: _under(client, 1) is not None and standby.answers("prefix_lookup") > 20,
            "lookups by prefix that the standby answers",
        )


def _under(client: StorageClient, key: int) -> dict[str, Any] | None:
    """Return the row of a key, looked up by prefix."""
    rows: list[dict[str, Any]] = client.prefix_lookup("keyed", [{"id": key}]).to_pylist()
    return rows[0] if rows else None


def _answers(machine: Machine) -> int:
    """The lookups that a process has answered with rows."""
    return machine.answers("row", "lookup", "prefix_lookup")


class _Clients:
    """Threads, each a client with keys of its own: what it does with them is one history each."""

    def __init__(self, endpoint: str, count: int) -> None:
        self._endpoint = endpoint
        self.histories = [History() for _ in range(count)]
        self._ended = threading.Event()
        self.failures: list[BaseException] = []
        self.reads = 0
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(count)]

    def __enter__(self) -> _Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self, number: int) -> None:
        random, part, value = Random(number), self.histories[number].part(), 0
        try:
            with StorageClient(f"{self._endpoint}#failover_s=60", read_from="any") as client:
                while not self._ended.is_set():
                    key, value = 10 * number + random.randrange(3), value + 1
                    if random.random() < 0.3:
                        started = time.monotonic_ns()
                        client.upsert("keyed", [{"id": key, "value": value}])
                        part.append(self._call(key, "write", value, started))
                    started = time.monotonic_ns()
                    is_one = random.random() < 0.5
                    row = client.lookup_one("keyed", id=key) if is_one else _under(client, key)
                    self.reads += 1
                    part.append(self._call(key, "read", row and row["value"], started))
        except BaseException as error:  # noqa: BLE001 - the test says it
            self.failures.append(error)

    @staticmethod
    def _call(key: int, kind: Any, value: Any, started_ns: int) -> Call:
        ended_ns = time.monotonic_ns()
        return Call(key=key, kind=kind, value=value, started_ns=started_ns, answered_ns=ended_ns)


@pytest.mark.parametrize("store", ["file", "faulty s3"])
def test_no_client_reads_older_than_its_own_writes_through_takeovers(pair: Pair) -> None:
    """Owners are killed -9 one after the other; the killed machine comes back as a standby."""
    with StorageClient(pair.endpoint) as client:
        _create(pair, client, bucket_count=2)
    with _Clients(pair.endpoint, 3) as clients:
        for _ in range(3):
            owner = pair.owner(60)
            standby = pair.other(owner)
            before = _answers(standby)
            wait_until(lambda b=before, s=standby: _answers(s) > b + 30, "the standby's answers")
            owner.kill()
            standby.wait_until_owner(60)
            reads = clients.reads
            wait_until(lambda r=reads: clients.reads > r + 30, "reads after the takeover")
            owner.start("--standby")

    assert not clients.failures, clients.failures
    for history in clients.histories:
        contradiction = find_contradiction(history.calls())
        assert contradiction is None, contradiction
