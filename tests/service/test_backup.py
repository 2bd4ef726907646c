"""Backups are worth what a restore brings back after the original is gone."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import StreamhouseError
from tests.support.command_line import streamhouse
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

EVENTS = pa.schema([("writer", pa.int64()), ("n", pa.int64()), ("padding", pa.string())])
USERS = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64())])
NO_LAKE = {"table.datalake.enabled": "false"}
ROWS_A_CALL = 12


class Writers:
    """Threads that write until stopped, each remembering what was acknowledged."""

    def __init__(self, endpoint: str, count: int) -> None:
        self.acknowledged = [0] * count
        self._endpoint = endpoint
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        with StreamhouseClient(self._endpoint) as client:
            for call in itertools.count(1):
                if self._stopping.is_set():
                    return
                rows = [{"writer": number, "n": call, "padding": "x" * 5_000}] * ROWS_A_CALL
                users = [{"id": i * 10 + number, "n": call} for i in range(ROWS_A_CALL)]
                try:
                    client.append("events", pa.Table.from_pylist(rows, schema=EVENTS))
                    client.upsert("users", pa.Table.from_pylist(users, schema=USERS))
                except StreamhouseError:
                    return
                self.acknowledged[number] = call

    def wait_for(self, calls: int) -> None:
        while min(self.acknowledged) < calls:
            assert any(thread.is_alive() for thread in self._threads)
            self._threads[0].join(0.01)

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()


def _batch(number: int) -> pa.Table:
    rows = [{"writer": 0, "n": number, "padding": ""}] * 100
    return pa.Table.from_pylist(rows, schema=EVENTS)


# A key is never null.
EVENTS_BY_KEY = pa.schema([field.with_nullable(field.name != "n") for field in EVENTS])


def _create(client: StreamhouseClient) -> None:
    # Small segments: a backup then has linked ones and a copied one of every bucket.
    small = {"table.log.segment-bytes": "64kb"} | NO_LAKE
    client.create_table("events", EVENTS, bucket_count=3, properties=small)
    client.create_table("users", USERS, primary_key=["id"], bucket_count=3, properties=small)


def _destroy(service: ServiceProcess, data: Path) -> None:
    service.kill()
    shutil.rmtree(data)


def _check_restored(client: StreamhouseClient, before: list[int]) -> None:
    rows = client.read("events")
    calls = Counter(zip(rows["writer"].to_pylist(), rows["n"].to_pylist(), strict=True))
    # Every append is there as a whole or not at all, over all buckets.
    assert set(calls.values()) == {ROWS_A_CALL}
    for writer, acknowledged in enumerate(before):
        seen = sorted(n for w, n in calls if w == writer)
        assert seen == list(range(1, len(seen) + 1))
        assert len(seen) >= acknowledged
    users = _folded(client, "users")
    by_writer: dict[int, set[int]] = {}
    for key, n in users.items():
        by_writer.setdefault(key % 10, set()).add(n)
        assert client.lookup_one("users", id=key) == {"id": key, "n": n}
    # So is every upsert, and the rows by key are what the changelog says.
    assert all(len(values) == 1 for values in by_writer.values())
    assert all(min(by_writer[w]) >= n for w, n in enumerate(before))
    assert client.count("users") == len(users)


def _folded(client: StreamhouseClient, path: str) -> dict[int, int]:
    rows: dict[int, int] = {}
    for bucket, positions in client.positions(path).items():
        for batch in client.read_range(path, bucket, 0, positions.high_watermark):
            for row in batch.data.to_pylist():
                if row["__change_type"] in (1, 3):
                    rows[row["id"]] = row["n"]
    return rows


def test_an_online_backup_under_writers_survives_the_original(tmp_path: Path) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    with ServiceProcess(data) as service:
        with StreamhouseClient(service.endpoint) as client:
            _create(client)
        writers = Writers(service.endpoint, 3)
        try:
            writers.wait_for(20)
            with StreamhouseClient(service.endpoint) as client:
                client.create_table("batches", EVENTS, bucket_count=3, properties=NO_LAKE)
                ended = client.begin_transaction("batches", app_id="job", version=7)
                ended.commit([ended.stage(_batch(7))])
                opened = client.begin_transaction("batches", app_id="job", version=8)
                part = opened.stage(_batch(8))
            before = list(writers.acknowledged)
            streamhouse(
                "backup", "--data-dir", data, "--to", backup, "--endpoint", service.endpoint
            )
            writers.wait_for(before[0] + 10)
        finally:
            writers.stop()
        assert not (data / "backup.staged").exists()
        _destroy(service, data)

    streamhouse("restore", "--from", backup)
    streamhouse("restore", "--from", backup, "--data-dir", data)
    with ServiceProcess(data) as service, StreamhouseClient(service.endpoint) as client:
        _check_restored(client, before)
        # What was committed is, once; what was staged can still be committed.
        assert client.begin_transaction("batches", app_id="job", version=7).is_skipped
        assert set(client.read("batches")["n"].to_pylist()) == {7}
        client.open_transaction("batches", opened.transaction_id).commit([part])
        assert client.begin_transaction("batches", app_id="job", version=8).is_skipped
        assert Counter(client.read("batches")["n"].to_pylist()) == {7: 100, 8: 100}
        positions = client.positions("events")
        client.append("events", pa.table({"writer": [9], "n": [9], "padding": [""]}, schema=EVENTS))
        assert sum(p.high_watermark for p in client.positions("events").values()) == 1 + sum(
            p.high_watermark for p in positions.values()
        )
    assert any(backup.rglob("*.index")), "no segment was sealed: nothing was linked"
    # The restored service has written: the backup is as it was.
    assert "verified" in streamhouse("restore", "--from", backup).stdout


@pytest.mark.parametrize("end", [ServiceProcess.terminate, ServiceProcess.kill])
def test_a_stopped_service_is_backed_up_without_it(
    tmp_path: Path, end: Callable[[ServiceProcess], object]
) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    with ServiceProcess(data) as service:
        with StreamhouseClient(service.endpoint) as client:
            _create(client)
        writers = Writers(service.endpoint, 1)
        writers.wait_for(10)
        writers.stop()
        end(service)
    streamhouse("backup", "--data-dir", data, "--to", backup)
    data_mode = data.stat().st_mode
    shutil.rmtree(data)

    streamhouse("restore", "--from", backup, "--data-dir", tmp_path / "elsewhere")
    for made in (data_mode, backup.stat().st_mode, (tmp_path / "elsewhere").stat().st_mode):
        assert made & 0o777 == 0o700

    with (
        ServiceProcess(tmp_path / "elsewhere") as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        _check_restored(client, writers.acknowledged)


def test_a_backup_with_its_lake_goes_on_where_it_was(tmp_path: Path) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"

    def rows(start: int, end: int) -> pa.Table:
        numbers = [{"writer": 0, "n": n, "padding": ""} for n in range(start, end)]
        return pa.Table.from_pylist(numbers, schema=EVENTS)

    with ServiceProcess(data) as service:
        with StreamhouseClient(service.endpoint) as client:
            layout = {"table.datalake.batch-layout.sort": "n"}
            client.create_table("events", EVENTS, bucket_count=2, properties=layout)
            history = {"table.datalake.changelog": "true", **layout}
            client.create_table("keyed", EVENTS_BY_KEY, primary_key=["n"], properties=history)
            client.append("events", rows(0, 5_000))
            client.upsert("keyed", rows(0, 500))
            tier_once(client)
            client.append("events", rows(5_000, 6_000))
            arguments = ("backup", "--data-dir", data, "--to", backup, "--with-lake")
            streamhouse(*arguments, "--endpoint", service.endpoint)
            client.append("events", rows(6_000, 7_000))
            client.upsert("keyed", rows(400, 600))
            tier_once(client)
        _destroy(service, data)

    assert (
        "restore it there"
        in streamhouse(
            "restore", "--from", backup, "--data-dir", tmp_path / "elsewhere", expect=1
        ).stderr
    )
    streamhouse("restore", "--from", backup, "--data-dir", data)
    streamhouse("check", "--data-dir", data, "--lake-rows")

    with ServiceProcess(data) as service, StreamhouseClient(service.endpoint) as client:
        assert sorted(client.read("events")["n"].to_pylist()) == list(range(6_000))
        client.append("events", rows(6_000, 8_000))
        client.upsert("keyed", rows(450, 700))
        tier_once(client)
        assert sorted(client.read("events$lake")["n"].to_pylist()) == list(range(8_000))
        # Such a read may be answered from the batch layout.
        late = client.read("events", columns=["n"], where="n >= 7990")
        assert sorted(late["n"].to_pylist()) == list(range(7_990, 8_000))
        assert sorted(client.read("keyed")["n"].to_pylist()) == list(range(700))
        # A row written as it is already is no change.
        assert client.read("keyed$changelog").num_rows == 700
    streamhouse("check", "--data-dir", data, "--lake-rows")


def test_what_is_no_backup_or_damaged_is_refused(tmp_path: Path) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    with ServiceProcess(data) as service, StreamhouseClient(service.endpoint) as client:
        _create(client)
    streamhouse("backup", "--data-dir", data, "--to", backup)
    refused = streamhouse("backup", "--data-dir", data, "--to", backup, expect=1)
    assert "is not empty" in refused.stderr
    assert (
        "has no service.json"
        in streamhouse("backup", "--data-dir", tmp_path, "--to", tmp_path / "b", expect=1).stderr
    )
    assert (
        "is not empty"
        in streamhouse("restore", "--from", backup, "--data-dir", data, expect=1).stderr
    )
    assert "is no backup" in streamhouse("restore", "--from", data, expect=1).stderr

    segment = next(backup.rglob("*.log"))
    segment.write_bytes(segment.read_bytes()[:-1] + b"\x00\x01")

    for arguments in ((), ("--data-dir", tmp_path / "new")):
        done = streamhouse("restore", "--from", backup, *arguments, expect=1)
        assert f"{segment} is damaged" in done.stderr
    # Half a restore is no data directory.
    line = streamhouse("serve", "--data-dir", tmp_path / "new", "--port", 0, expect=1).stderr
    assert "has tables but no service.json" in line


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    backup.mkdir()
    manifest = {
        "format_version": 1,
        "with_lake": False,
        "data_dir": "/d",
        "created_at_us": 0,
        "files": {"../evil": {"bytes": 0, "sha256": ""}},
    }
    (backup / "manifest.json").write_text(json.dumps(manifest))

    done = streamhouse("restore", "--from", backup, "--data-dir", tmp_path / "new", expect=1)

    assert "names a file outside of it" in done.stderr


def test_a_backup_that_was_broken_off_is_given_up_on_request(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with ServiceProcess(data) as service:
        (data / "backup.staged").mkdir()
        arguments = ("backup", "--data-dir", data, "--endpoint", service.endpoint)
        done = streamhouse(*arguments, "--to", tmp_path / "a", expect=1)
        assert "--discard-staged" in done.stderr
        streamhouse(*arguments, "--to", tmp_path / "b", "--discard-staged")
        with ServiceProcess(tmp_path / "other") as other:
            done = streamhouse(
                "backup", "--data-dir", data, "--to", tmp_path / "c",
                "--endpoint", other.endpoint, expect=1,
            )  # fmt: skip
            assert "is not the one that uses" in done.stderr


def test_a_process_that_has_another_directory_is_not_believed(tmp_path: Path) -> None:
    data, twin = tmp_path / "data", tmp_path / "twin"
    with ServiceProcess(data) as service, StreamhouseClient(service.endpoint) as client:
        _create(client)
    shutil.copytree(data, twin)
    with ServiceProcess(data), ServiceProcess(twin) as other:
        arguments = ("backup", "--data-dir", data, "--endpoint", other.endpoint)
        done = streamhouse(*arguments, "--to", tmp_path / "a", expect=1)
        assert f"is not the one that uses {data}" in done.stderr
        assert not (twin / "backup.staged").exists()
        # Nor is what was left here taken for what was staged there.
        (data / "backup.staged").mkdir()
        done = streamhouse(*arguments, "--to", tmp_path / "b", expect=1)
        assert "--discard-staged" in done.stderr
        done = streamhouse(*arguments, "--to", tmp_path / "c", "--discard-staged", expect=1)
        assert f"is not the one that uses {data}" in done.stderr
    assert not any((tmp_path / name).exists() for name in "abc")
