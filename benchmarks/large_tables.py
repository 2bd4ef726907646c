"""Two large tables, for what a service does with them when it starts: a log, and rows by key."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from benchmarks.harness import SCHEMA, make_rows
from streamhouse.client import StorageClient

__all__ = ["BATCH_ROWS", "KEYS", "KEY_BUCKETS", "check_keys", "check_log", "fill_keys", "fill_log"]

LOG_BYTES: Final = 1 << 30
LOG_BUCKETS: Final = 4
KEYS: Final = 5_000_000
KEY_BUCKETS: Final = 4
BATCH_ROWS: Final = 250_000
_SOME_KEYS: Final = pa.table(
    {"id": np.arange(0, KEYS, KEYS // 1_000)}, schema=pa.schema([SCHEMA.field("id")])
)


def fill_log(client: StorageClient) -> int:
    """Make the table `log` with a gigabyte of rows; return how many."""
    rows, log_bytes = 0, 0
    client.create_table("log", SCHEMA, bucket_count=LOG_BUCKETS)
    batch = make_rows(BATCH_ROWS)
    while log_bytes < LOG_BYTES:
        client.append("log", batch)
        rows += batch.num_rows
        log_bytes += batch.nbytes
    return rows


def fill_keys(client: StorageClient, *, properties: dict[str, str] | None = None) -> None:
    """Make the table `keys` with five million rows by key."""
    client.create_table(
        "keys", SCHEMA, primary_key=["id"], bucket_count=KEY_BUCKETS, properties=properties
    )
    for first in range(0, KEYS, BATCH_ROWS):
        client.upsert("keys", make_rows(BATCH_ROWS, first_id=first))


def check_log(client: StorageClient, rows: int) -> None:
    """Raise unless the log has all its rows."""
    ends = client.positions("log").values()
    assert sum(position.high_watermark for position in ends) == rows


def check_keys(client: StorageClient) -> None:
    """Raise unless all rows by key are counted, and a thousand of them are found."""
    assert client.count("keys") == KEYS
    assert all(client.lookup("keys", _SOME_KEYS)["__found"].to_pylist())
