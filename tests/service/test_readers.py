"""Readers beside the owner, as a client sees them: the owner's answers, never older ones."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pytest
import urllib3

from streamhouse.client import StorageClient
from streamhouse.core.wire.arrow_body import encode_append_body
from streamhouse.storage_service.server.access._grants import token_hash
from tests.support.reader_world import NO_LAKE, SCHEMA, RowConnection, reader_pids, rows
from tests.support.service_process import ServiceProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("readers"), "--readers", "2") as process:
        yield process


@pytest.fixture
def moved(service: ServiceProcess, client: StorageClient) -> Iterator[RowConnection]:
    """A connection that a reader has, to a table of a hundred rows."""
    connection = _moved_connection(service)
    yield connection
    connection.close()


def _moved_connection(service: ServiceProcess, *, timeout_s: float = 60) -> RowConnection:
    """Create the table, and return a connection that a reader has."""
    with StorageClient(service.endpoint) as client:
        _create(client)
    connection = RowConnection(service, "t", timeout_s=timeout_s)
    connection.move()
    return connection


def _create(client: StorageClient, schema: pa.Schema = SCHEMA) -> None:
    client.create_table("t", schema, primary_key=["id"], bucket_count=4, properties=NO_LAKE)
    client.upsert("t", rows(*range(100)))


def test_a_reader_has_every_acknowledged_write(client: StorageClient, moved: RowConnection) -> None:
    reader = moved.who
    for number in range(30):
        client.upsert("t", rows(number, 1_000 + number, name=f"n{number}"))
        assert moved.row(number) == {"id": number, "name": f"n{number}"}
        assert moved.row(1_000 + number) == {"id": 1_000 + number, "name": f"n{number}"}
        client.delete("t", pa.table({"id": [number]}, schema=pa.schema([SCHEMA.field("id")])))
        assert moved.row(number) is None
        assert moved.who == reader
    assert moved.row(99) == {"id": 99, "name": "first"}


def test_a_reader_has_many_changes_at_once(client: StorageClient, moved: RowConnection) -> None:
    client.upsert("t", rows(*range(50_000), name="many"))

    assert moved.row(49_999) == {"id": 49_999, "name": "many"}
    assert moved.row(50_000) is None


def test_a_reader_answers_lookups(client: StorageClient, moved: RowConnection) -> None:
    reader = moved.who
    client.upsert("t", rows(7, name="seven"))
    keys = pa.RecordBatch.from_pydict({"id": [7, 500, 8]}, schema=pa.schema([SCHEMA.field("id")]))
    body = encode_append_body(keys.schema, [(None, 0, keys)])
    headers = {"content-type": "application/vnd.apache.arrow.stream"}

    status, content = moved.request("POST", "/lookup", body=body, headers=headers)

    assert status == 200
    assert moved.who == reader
    assert pa.ipc.open_stream(content).read_all().to_pylist() == [
        {"id": 7, "name": "seven", "__found": True},
        {"id": None, "name": None, "__found": False},
        {"id": 8, "name": "first", "__found": True},
    ]


def test_the_least_of_an_answer_is_there_or_the_owner_says_so(
    client: StorageClient, moved: RowConnection
) -> None:
    reader, table_id = moved.who, client.describe_table("t").table_id
    ranges = client.upsert("t", rows(7, name="seven"))
    least = json.dumps({bucket: int(end) for bucket, (_, end) in ranges.items()})

    def row(at_least: str) -> tuple[int, bytes]:
        return moved.request("GET", f"/rows/7?table_id={table_id}&at_least={quote(at_least)}")

    assert row(least) == (200, b'{"id": 7, "name": "seven"}')
    assert moved.who == reader
    status, content = row('{"0": 1000000}')
    assert (status, json.loads(content)["error"]["code"]) == (409, "log_cut")
    assert moved.who != reader


@pytest.mark.parametrize("count", [5_000, 200_000])
def test_lookups_of_many_keys_are_answered(
    client: StorageClient, moved: RowConnection, count: int
) -> None:
    """The larger request is too large for a reader, and goes to the owner."""
    reader = moved.who
    client.upsert("t", rows(*range(0, count, 2), name="even"))
    moved.row(0)
    keys = pa.record_batch({"id": range(count)}, schema=pa.schema([SCHEMA.field("id")]))
    body = encode_append_body(keys.schema, [(None, 0, keys)])
    headers = {"content-type": "application/vnd.apache.arrow.stream"}

    status, content = moved.request("POST", "/lookup", body=body, headers=headers)

    assert status == 200
    assert (moved.who == reader) == (len(body) < 1 << 20)
    answer = pa.ipc.open_stream(content).read_all()
    assert answer["__found"].to_pylist()[100:] == [True, False] * ((count - 100) // 2)
    assert answer["name"].to_pylist()[100:] == ["even", None] * ((count - 100) // 2)


def test_a_reader_counts_rows(client: StorageClient, moved: RowConnection) -> None:
    reader = moved.who
    assert moved.request("GET", "/count") == (200, b'{"count": 100}')
    client.upsert("t", rows(7, 500, 501, name="more"))
    assert moved.request("GET", "/count") == (200, b'{"count": 102}')
    client.delete("t", pa.table({"id": [7, 8, 900]}, schema=pa.schema([SCHEMA.field("id")])))
    assert moved.request("GET", "/count") == (200, b'{"count": 100}')
    client.upsert("t", rows(*range(50_000), name="many"))
    assert moved.request("GET", "/count") == (200, b'{"count": 50000}')
    assert moved.who == reader


def test_other_requests_of_the_connection_are_the_owners(
    service: ServiceProcess, client: StorageClient, moved: RowConnection
) -> None:
    reader = moved.who
    line = b'{"id": 5, "name": "from a line"}\n'

    status, content = moved.request(
        "POST", "/upsert", body=line, headers={"content-type": "application/x-ndjson"}
    )

    assert status == 200, content
    assert moved.who != reader
    assert moved.row(5) == {"id": 5, "name": "from a line"}
    assert client.lookup("t", pa.table({"id": [5]}))["name"].to_pylist() == ["from a line"]
    status, content = moved.request("GET", "/count")
    assert (status, json.loads(content)) == (200, {"count": 100})


def test_wrong_keys_are_refused_by_the_owner(moved: RowConnection) -> None:
    reader = moved.who

    status, content = moved.request("GET", "/rows/x")

    assert status == 400
    assert json.loads(content)["error"]["code"] == "invalid_request"
    assert moved.who != reader


def test_another_schema_is_answered_at_once(client: StorageClient, moved: RowConnection) -> None:
    client.add_column("t", "more", "bigint")

    assert moved.row(1) == {"id": 1, "name": "first", "more": None}
    moved.move()
    assert moved.row(1) == {"id": 1, "name": "first", "more": None}


def test_a_dropped_table_is_gone_at_once(client: StorageClient, moved: RowConnection) -> None:
    client.drop_table("t")

    status, content = moved.request("GET", "/rows/1")
    assert status == 404
    assert json.loads(content)["error"]["code"] == "table_not_found"

    client.create_table("t", SCHEMA, primary_key=["id"], bucket_count=1, properties=NO_LAKE)
    assert moved.row(1) is None
    client.upsert("t", rows(1, name="anew"))
    assert moved.row(1) == {"id": 1, "name": "anew"}
    moved.move()
    assert moved.row(1) == {"id": 1, "name": "anew"}


def test_a_transaction_is_shown_as_a_whole(client: StorageClient, moved: RowConnection) -> None:
    reader = moved.who
    with client.begin_transaction("t", operation="upsert") as transaction:
        part = transaction.stage(rows(*range(20), name="staged"))
        assert moved.row(3) == {"id": 3, "name": "first"}
        transaction.commit([part])

    assert {row["name"] for row in map(moved.row, range(20)) if row} == {"staged"}
    assert moved.who == reader


def test_the_counts_of_all_processes_add_up(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path, "--readers", "1") as service:
        connection = _moved_connection(service)

        def counted() -> int:
            text = urllib3.request("GET", f"{service.endpoint}/metrics").data.decode()
            name = 'streamhouse_requests_total{route="row",status="200"} '
            return sum(int(float(t.removeprefix(name))) for t in text.split("\n") if name in t)

        wait_until(lambda: counted() == connection.answer_count, "the counts of the reader")
        for pid in reader_pids(service):
            os.kill(pid, signal.SIGKILL)
        assert counted() == connection.answer_count
        connection.close()


def test_a_killed_reader_is_replaced(service: ServiceProcess, moved: RowConnection) -> None:
    killed = reader_pids(service)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)

    wait_until(lambda: not any(map(_is_running, killed)), "the end of the readers")
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        moved.row(1)
    moved.close()
    moved.move()
    assert moved.row(1) == {"id": 1, "name": "first"}
    assert not set(killed) & set(reader_pids(service))


def test_a_killed_owner_leaves_nobody_who_answers(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path, "--readers", "2") as service:
        connection = _moved_connection(service)
        readers = reader_pids(service)
        service.kill()

        with pytest.raises((http.client.HTTPException, ConnectionError)):
            connection.row(1)
        connection.close()
        assert len(readers) == 2
    # The next owner waits for the readers of the last one, who hold the lock, too.
    with ServiceProcess(tmp_path, "--readers", "1") as service:
        assert not [pid for pid in readers if _is_running(pid)]
        connection = RowConnection(service, "t")
        connection.move()
        assert connection.row(1) == {"id": 1, "name": "first"}
        connection.close()


def _is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text("ascii", "replace").rpartition(")")[2].split()[0] != "Z"


def test_rows_that_do_not_fit_stay_with_the_owner(tmp_path: Path) -> None:
    with (
        ServiceProcess(tmp_path, "--readers", "1", "--key-cache-bytes-max", "64KiB") as service,
        StorageClient(service.endpoint) as client,
    ):
        client.create_table("t", SCHEMA, primary_key=["id"], bucket_count=1, properties=NO_LAKE)
        client.upsert("t", rows(*range(20_000)))
        connection = RowConnection(service, "t")
        connection.row(0)
        owner = connection.who
        wait_until(
            lambda: connection.row(0) and "event=reader_lost_table" in service.log_text(),
            "the log line of a table that is not held",
        )
        assert connection.row(19_999) == {"id": 19_999, "name": "first"}
        assert connection.who == owner
        connection.close()


def test_tokens_are_checked_as_by_the_owner(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret-token-of-some-length", "ascii")
    token.chmod(0o600)
    with (
        ServiceProcess(tmp_path / "data", "--readers", "1", "--token-file", str(token)) as service,
        StorageClient(service.endpoint, token=token.read_text("ascii")) as client,
    ):
        _create(client)
        right = {"authorization": f"Bearer {token.read_text('ascii')}"}
        connection = RowConnection(service, "t", headers=right)
        reader = connection.move()

        status, content = connection.request(
            "GET", "/rows/1", headers={"authorization": "Bearer wrong"}
        )

        assert status == 401
        assert json.loads(content)["error"]["code"] == "unauthorized"
        assert connection.who != reader
        assert connection.row(1) == {"id": 1, "name": "first"}
        connection.close()


def test_a_reader_that_starts_with_a_broken_grants_file_has_the_owners_grants(
    tmp_path: Path,
) -> None:
    file = tmp_path / "grants.toml"
    entry = '[[token]]\nname = "a"\nsha256 = "{}"\ngrants = ["admin:*"]\n'
    file.write_text(entry.format(token_hash(b"of-a")), "ascii")
    file.chmod(0o600)
    with (
        ServiceProcess(tmp_path / "data", "--readers", "1", "--grants", str(file)) as service,
        StorageClient(service.endpoint, token="of-a") as client,
    ):
        _create(client)
        file.write_text("[[token", "ascii")
        for pid in reader_pids(service):
            os.kill(pid, signal.SIGKILL)

        connection = RowConnection(service, "t", headers={"authorization": "Bearer of-a"})
        connection.move()
        assert connection.row(1) == {"id": 1, "name": "first"}
        reader = connection.who
        status, _ = connection.request("GET", "/rows/1", headers={"authorization": "Bearer of-b"})
        assert status == 401
        assert connection.who != reader
        connection.close()


def test_a_stop_ends_readers_and_their_connections(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path, "--readers", "2") as service:
        connection = _moved_connection(service)
        readers = reader_pids(service)

        assert service.terminate() == 0

        assert not [pid for pid in readers if _is_running(pid)]
        connection.close()


def test_readers_of_an_owner_without_its_lease_answer_nothing(tmp_path: Path) -> None:
    journal = ("--journal", f"file://{tmp_path / 'journal'}", "--lease-ms", "2s")
    with (
        ServiceProcess(tmp_path / "owner", *journal, "--readers", "1") as owner,
        ServiceProcess(tmp_path / "standby", *journal, "--standby") as standby,
    ):
        connection = _moved_connection(owner, timeout_s=3)
        owner.send(signal.SIGSTOP)
        try:
            standby.wait_ready()
            with StorageClient(standby.endpoint) as client:
                client.upsert("t", rows(1, name="of the next owner"))

            # The reader runs on, and gives the connection to the owner, which is paused.
            with pytest.raises(TimeoutError):
                connection.row(1)
        finally:
            owner.send(signal.SIGCONT)
        owner.wait()
        connection.close()
