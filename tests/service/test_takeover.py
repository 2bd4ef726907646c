"""Processes over one journal: what was acknowledged outlives the owner's machine, once."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pytest

from streamhouse.client import StorageClient
from streamhouse.core.errors import CheckFailedError
from streamhouse.storage_service.ownership.roles.ending import (
    FENCED_EXIT_CODE,
    NOT_STORED_EXIT_CODE,
)
from tests.support.in_process_service import append_body
from tests.support.service_process import DiedAtStart, ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
LEASE_MS = 1_500

Start = Callable[..., ServiceProcess]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Return what starts a process on the directory of this name, over one journal."""

    def start(name: str, *arguments: str) -> ServiceProcess:
        journal = ["--journal", f"file://{tmp_path / 'journal'}", "--lease-ms", str(LEASE_MS)]
        return ServiceProcess(tmp_path / name, *journal, *arguments)

    return start


def _call(method: str, url: str, body: bytes = b"", *, timeout_s: float = 30) -> tuple[int, bytes]:
    """Send one request; return the status and body of its answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=timeout_s)
    headers = {"content-type": "application/vnd.apache.arrow.stream"} if body else {}
    try:
        connection.request(method, f"{parts.path}?{parts.query}", body or None, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _append(endpoint: str, rows: pa.Table, *, sequence: int, timeout_s: float = 30) -> Any:
    """Append once, as a writer with an id; return where the rows are."""
    (batch,) = rows.combine_chunks().to_batches()
    url = f"{endpoint}/v1/tables/events/append?writer_id=7"
    body = append_body(SCHEMA, [(0, sequence, batch)])
    status, answer = _call("POST", url, body, timeout_s=timeout_s)
    assert status == 200, answer
    return json.loads(answer)["buckets"]


def _get(url: str) -> tuple[int, Any]:
    status, body = _call("GET", url)
    return status, json.loads(body)


def _rows(start: int, end: int, name: str = "n") -> pa.Table:
    return pa.table({"id": range(start, end), "name": [name] * (end - start)}, schema=SCHEMA)


def _make_tables(client: StorageClient) -> None:
    client.create_table("events", SCHEMA)
    client.create_table("keyed", SCHEMA, primary_key=["id"])


def _ids(client: StorageClient) -> list[int]:
    """Return the ids of all rows of the log table, in order."""
    found: list[int] = []
    for bucket, positions in client.positions("events").items():
        for batch in client.read_range("events", bucket, 0, positions.high_watermark):
            found += batch.data.column("id").to_pylist()
    return sorted(found)


def _names(client: StorageClient, ids: range) -> dict[int, str]:
    keys = pa.table({"id": ids}, schema=pa.schema([SCHEMA.field("id")]))
    found = client.lookup("keyed", keys).to_pylist()
    return {row["id"]: row["name"] for row in found if row["id"] is not None}


@pytest.mark.parametrize("ack", ["journal", "disk"])
def test_a_standby_has_every_acknowledged_row_after_the_owners_machine_is_lost(
    tmp_path: Path, start: Start, ack: str
) -> None:
    with (
        start("one", "--journal-ack", ack) as owner,
        start("two", "--standby", "--journal-ack", ack) as standby,
    ):
        with StorageClient(owner.endpoint) as client:
            _make_tables(client)
            for number in range(10):
                client.append("events", _rows(10 * number, 10 * number + 10))
                client.upsert("keyed", _rows(0, 10 + number, f"v{number}"))
            if ack == "disk":
                _wait_until_journalled(owner)
        owner.kill()
        shutil.rmtree(tmp_path / "one")

        standby.wait_ready()

        with StorageClient(standby.endpoint) as client:
            assert _ids(client) == list(range(100))
            assert _names(client, range(30)) == dict.fromkeys(range(19), "v9")
            client.append("events", _rows(100, 110))
            client.upsert("keyed", _rows(5, 6, "after"))
            assert _ids(client) == list(range(110))
            assert _names(client, range(5, 6)) == {5: "after"}


def test_a_standby_judges_by_the_constraints_of_the_lost_owner(
    tmp_path: Path, start: Start
) -> None:
    check = {"table.check.short": "name LIKE 'n%'"}
    bad = _rows(50, 51, "bad")
    with start("one") as owner, start("two", "--standby") as standby:
        with StorageClient(owner.endpoint) as client:
            client.create_table("events", SCHEMA, properties=check)
            client.create_table("keyed", SCHEMA, primary_key=["id"])
            client.upsert("keyed", bad)
            existing = {"table.check.short.existing": "not enforced"}
            client.alter_properties("keyed", updates=check | existing)
            open_transaction = client.begin_transaction("events", operation="append")
            part = open_transaction.stage(_rows(10, 20))
            client.append("events", _rows(0, 10))
        owner.kill()
        shutil.rmtree(tmp_path / "one")

        standby.wait_ready()

        with StorageClient(standby.endpoint) as client:
            for write, path in ((client.append, "events"), (client.upsert, "keyed")):
                with pytest.raises(CheckFailedError, match="breaks constraint 'short'"):
                    write(path, pa.concat_tables([_rows(30, 31), bad]))
            client.open_transaction("events", open_transaction.transaction_id).commit([part])
            assert _ids(client) == list(range(20))
            assert _names(client, range(100)) == {50: "bad"}


def _wait_until_journalled(owner: ServiceProcess) -> None:
    """With the acknowledgement of the disk the journal follows; here until it has followed."""
    behind = 1.0
    while behind:
        text = _call("GET", f"{owner.endpoint}/metrics")[1].decode()
        (line,) = [li for li in text.splitlines() if li.startswith("streamhouse_journal_lag_bytes")]
        behind = float(line.split()[-1])


def test_a_first_upload_that_the_store_refuses_ends_with_a_sentence(
    tmp_path: Path, start: Start
) -> None:
    with ServiceProcess(tmp_path / "one") as alone, StorageClient(alone.endpoint) as client:
        _make_tables(client)
        client.append("events", _rows(0, 10))
    packs = tmp_path / "journal" / "shards" / "0" / "packs"
    packs.parent.mkdir(parents=True)
    packs.touch()

    with pytest.raises(DiedAtStart) as died, start("one"):
        pass

    assert "cannot be used" in str(died.value)
    assert "Traceback" not in str(died.value)
    packs.unlink()
    with start("one") as owner, StorageClient(owner.endpoint) as client:
        assert _ids(client) == list(range(10))


def test_a_killed_owner_starts_again_on_its_own_directory_without_waiting(
    tmp_path: Path, start: Start
) -> None:
    with start("one") as owner, StorageClient(owner.endpoint) as client:
        _make_tables(client)
        client.append("events", _rows(0, 10))
        owner.kill()

    with start("one", "--lease-ms", "3600000") as again, StorageClient(again.endpoint) as client:
        assert _ids(client) == list(range(10))


def test_a_stop_while_the_store_is_away_ends_and_loses_nothing(
    tmp_path: Path, start: Start
) -> None:
    with start("one", "--drain-timeout-ms", "1000") as owner:
        with StorageClient(owner.endpoint) as client:
            _make_tables(client)
            client.append("events", _rows(0, 10))
        journal = tmp_path / "journal"
        journal.rename(tmp_path / "away")
        journal.write_text("no directory")
        # It waits for the journal, and so does closing its table.
        with pytest.raises(TimeoutError):
            _append(owner.endpoint, _rows(10, 20), sequence=1, timeout_s=0.5)

        code = owner.terminate()
        log = owner.log_text()
    journal.unlink()
    (tmp_path / "away").rename(journal)

    assert code == NOT_STORED_EXIT_CODE
    assert "did not take everything within 1 s (drain_timeout_ms)" in log
    with start("one") as again, StorageClient(again.endpoint) as client:
        # What was not answered may be there.
        assert _ids(client) in (list(range(10)), list(range(20)))


def test_a_clean_stop_hands_over_at_once(start: Start) -> None:
    """The lease is an hour: nothing waits for it."""
    hour = ("--lease-ms", "3600000")
    with start("one", *hour) as owner, start("two", "--standby", *hour) as standby:
        with StorageClient(owner.endpoint) as client:
            _make_tables(client)
            client.append("events", _rows(0, 10))

        assert owner.terminate() == 0
        standby.wait_ready()

        with StorageClient(standby.endpoint) as client:
            assert _ids(client) == list(range(10))


def test_a_paused_owner_answers_nothing_stale_and_ends_itself(start: Start) -> None:
    with start("one") as owner, start("two", "--standby") as standby:
        with StorageClient(owner.endpoint) as client:
            _make_tables(client)
            client.upsert("keyed", _rows(0, 1, "before"))
        owner.send(signal.SIGSTOP)
        standby.wait_ready()
        with StorageClient(standby.endpoint) as client:
            client.upsert("keyed", _rows(0, 1, "after"))
        owner.send(signal.SIGCONT)

        answers = _answers_until_its_end(f"{owner.endpoint}/v1/tables/keyed/rows/0")

        assert set(answers) <= {421}
        assert owner.wait() == FENCED_EXIT_CODE
        assert "event=fenced" in owner.log_text()


def _answers_until_its_end(url: str) -> list[int]:
    answers = []
    while True:
        try:
            answers.append(_call("GET", url)[0])
        except (OSError, http.client.HTTPException):
            return answers


def test_a_repeat_after_a_takeover_is_answered_once(tmp_path: Path, start: Start) -> None:
    def send(endpoint: str) -> Any:
        return _append(endpoint, _rows(0, 10), sequence=1)

    with start("one") as owner, start("two", "--standby") as standby:
        with StorageClient(owner.endpoint) as client:
            _make_tables(client)
        first = send(owner.endpoint)
        owner.kill()
        shutil.rmtree(tmp_path / "one")
        standby.wait_ready()

        again = send(standby.endpoint)

        assert again == first
        with StorageClient(standby.endpoint) as client:
            assert _ids(client) == list(range(10))


def test_a_second_service_ends_with_a_sentence_that_names_the_owner(start: Start) -> None:
    with start("one") as owner, pytest.raises(DiedAtStart) as died, start("two"):
        pass

    assert f"is owned by the service at {owner.endpoint}" in str(died.value)
    assert "--standby" in str(died.value)


def test_of_two_standbys_one_takes_over_and_the_other_follows_it(
    tmp_path: Path, start: Start
) -> None:
    with (
        start("one") as owner,
        start("two", "--standby") as two,
        start("three", "--standby") as three,
    ):
        with StorageClient(owner.endpoint) as client:
            _make_tables(client)
            client.append("events", _rows(0, 10))
        owner.terminate()
        first = _first_ready(two, three)
        second = three if first is two else two
        with StorageClient(first.endpoint) as client:
            client.append("events", _rows(10, 20))
        first.kill()

        second.wait_ready()

        with StorageClient(second.endpoint) as client:
            assert _ids(client) == list(range(20))


def _first_ready(*standbys: ServiceProcess) -> ServiceProcess:
    while True:
        for standby in standbys:
            if _get(f"{standby.endpoint}/ready")[0] == 200:
                standby.wait_ready()
                return standby
