"""Kill -9 at any moment: what was acknowledged is there afterwards, once."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.client import StorageClient
from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.lake.facts import SideLakeState
from streamhouse.core.model.table_state import TieringReport
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("writer", pa.int64()), pa.field("number", pa.int64())])


def _rows(writer: int, number: int) -> pa.Table:
    return pa.table({"writer": [writer] * 10, "number": [number] * 10}, schema=SCHEMA)


def _stored(client: StorageClient) -> list[tuple[int, int]]:
    """(writer, number) of every stored row."""
    found = []
    for bucket, positions in client.positions("events").items():
        for batch in client.read_range("events", bucket, 0, positions.high_watermark):
            found += list(
                zip(
                    batch.data.column("writer").to_pylist(),
                    batch.data.column("number").to_pylist(),
                    strict=True,
                )
            )
    return found


def test_acknowledged_rows_survive_kill_9_each_exactly_once(tmp_path: Path) -> None:
    """Four writers append until the service is killed under them, three times over."""
    acknowledged: set[tuple[int, int]] = set()
    attempted: set[tuple[int, int]] = set()
    lock = threading.Lock()

    def write(
        endpoint: str, writer: int, enough: threading.Event, is_over: threading.Event
    ) -> None:
        with StorageClient(endpoint, timeout_s=0.5) as client:
            for number in range(100_000):
                with lock:
                    attempted.add((writer, number))
                try:
                    client.append("events", _rows(writer, number))
                except StreamhouseError:
                    if is_over.is_set():
                        return
                    # A busy machine, or the last moments of the service.
                    continue
                with lock:
                    acknowledged.add((writer, number))
                if number >= 20:
                    enough.set()

    for life in range(3):
        with ServiceProcess(tmp_path) as service:
            with StorageClient(service.endpoint) as client:
                if life == 0:
                    client.create_table("events", SCHEMA, bucket_count=3)
                _check(client, acknowledged, attempted)
            enough, is_over = threading.Event(), threading.Event()
            writers = [
                threading.Thread(
                    target=write, args=(service.endpoint, life * 10 + i, enough, is_over)
                )
                for i in range(4)
            ]
            for writer in writers:
                writer.start()
            assert enough.wait(60)
            service.kill()
            is_over.set()
            for writer in writers:
                writer.join(60)

    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        _check(client, acknowledged, attempted)


def _check(
    client: StorageClient, acknowledged: set[tuple[int, int]], attempted: set[tuple[int, int]]
) -> None:
    stored = _stored(client)
    counts = {key: stored.count(key) for key in set(stored)}
    assert acknowledged <= counts.keys(), "an acknowledged append is lost"
    assert counts.keys() <= attempted
    # An append that was cut off may be there, but then as a whole and not twice.
    assert set(counts.values()) <= {10}


def test_a_clean_stop_under_load_loses_nothing_and_leaves_a_clean_log(tmp_path: Path) -> None:
    acknowledged: set[tuple[int, int]] = set()
    attempted: set[tuple[int, int]] = set()
    refusals: set[str] = set()
    started = threading.Barrier(5)

    def write(endpoint: str, writer: int) -> None:
        with StorageClient(endpoint, timeout_s=4) as client:
            for number in range(100_000):
                attempted.add((writer, number))
                try:
                    client.append("events", _rows(writer, number))
                except StreamhouseError as error:
                    refusals.add(error.code)
                    return
                acknowledged.add((writer, number))
                if number == 20:
                    started.wait(60)

    with ServiceProcess(tmp_path) as service:
        with StorageClient(service.endpoint) as client:
            client.create_table("events", SCHEMA, bucket_count=3)
        writers = [
            threading.Thread(target=write, args=(service.endpoint, writer)) for writer in range(4)
        ]
        for writer in writers:
            writer.start()
        started.wait(60)
        assert service.terminate() == 0
        for writer in writers:
            writer.join(60)
        assert "level=warning" not in service.log_text()

    assert refusals <= {"unavailable", "unknown_outcome"}
    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        _check(client, acknowledged, attempted)


def test_lake_state_and_tables_survive_kill_9(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        client.create_database("sales")
        dropped = client.create_table("sales.gone", SCHEMA)
        client.drop_table("sales.gone")
        table = client.create_table(
            "sales.kept",
            SCHEMA,
            properties={"table.log.ttl": "1h", "table.datalake.batch-layout.sort": "writer"},
        )
        batch = SideLakeState(snapshot_id=2**61, table_uuid="b", tiered_offsets={0: 7})
        client.append("sales.kept", _rows(0, 0))
        claim = client.claim_tiering("w", force=True)
        client.complete_tiering(
            "sales.kept",
            TieringReport(
                table_id=table.table_id,
                epoch=claim.epoch,  # type: ignore[union-attr]  # granted: there are rows
                snapshot_id=2**60,
                table_uuid="u",
                tiered_offsets={0: 10},
                batch=batch,
            ),
        )
        service.kill()

    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        assert client.list_tables() == ["sales.kept"]
        state = client.table_state("sales.kept")
        assert state.table == table
        assert (state.lake.snapshot_id, state.lake.tiering_epoch) == (2**60, 1)
        assert state.lake.batch == batch
        assert state.positions[0].tiered_offset == 10
        assert client.create_table("sales.gone", SCHEMA).table_id > table.table_id
        assert table.table_id > dropped.table_id
