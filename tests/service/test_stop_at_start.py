"""SIGTERM while a service opens its tables: it ends, and the next start serves all of it."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.client import StorageClient
from tests.support.service_process import DiedAtStart, ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


def test_a_stop_ends_an_opening_that_would_take_for_ever(tmp_path: Path) -> None:
    """A pipe in the place of a file: who reads it waits for what nobody writes."""
    data_dir = tmp_path / "data"
    with ServiceProcess(data_dir) as service, StorageClient(service.endpoint) as client:
        client.create_table("events", SCHEMA)
        client.append("events", pa.table({"id": [1], "name": ["a"]}, schema=SCHEMA))
        assert service.terminate() == 0
    (table,) = data_dir.glob("tables/[0-9]")
    pipe = table / "lake_pins.json"
    os.mkfifo(pipe)
    service, is_over = ServiceProcess(data_dir), threading.Event()

    def stop_when_it_opens() -> None:
        with pipe.open("wb"):
            service.send(signal.SIGTERM)
            is_over.wait()

    stopping = threading.Thread(target=stop_when_it_opens, daemon=True)
    stopping.start()
    with pytest.raises(DiedAtStart, match="stopped_at_start"):
        service.__enter__()
    is_over.set()
    stopping.join()

    pipe.unlink()
    with ServiceProcess(data_dir) as again, StorageClient(again.endpoint) as client:
        (batch,) = client.read_range("events", 0, 0, 1)
        assert batch.data.to_pylist() == [{"id": 1, "name": "a"}]
