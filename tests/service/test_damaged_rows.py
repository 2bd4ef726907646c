"""A real service whose rows by key rot: never a wrong answer, and it mends itself."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import CorruptDataError
from tests.support.command_line import streamhouse
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())])
KEYS = 6_000
SENTENCE = "table 'default.t', bucket 0: its rows by key are damaged"
OPTIONS = ("--retention-interval-ms", "20", "--key-cache-bytes-max", "1")


def _rows(ids: range, text: str) -> pa.Table:
    return pa.table({"id": ids, "text": [f"{text} {i}" for i in ids]}, schema=SCHEMA)


def _flip(data: Path, chance: random.Random) -> None:
    """Flip a bit of a block of rows, in place, as a disk does it."""
    tables = sorted((data / "tables" / "1" / "bucket-0" / "kv").glob("*.sst"))
    table = max(tables, key=lambda path: path.stat().st_size)
    with table.open("r+b") as file:
        file.seek(chance.randrange(table.stat().st_size * 8 // 10))
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ (1 << chance.randrange(8))]))


def _asked(client: StreamhouseClient, expected: dict[int, str]) -> int:
    """Look everything up in pieces; each must be right or refused; return how many were not."""
    refused = 0
    for start in range(0, KEYS + 500, 500):
        ids = range(start, start + 500)
        try:
            found: list[dict[str, Any]] = client.lookup("t", pa.table({"id": ids})).to_pylist()
        except CorruptDataError as error:
            if SENTENCE not in error.message:
                raise
            refused += 1
            continue
        assert [row["text"] for row in found] == [expected.get(i) for i in ids]
    return refused


def _until_taken(client: StreamhouseClient, rows: pa.Table) -> None:
    for _ in range(10_000):
        with contextlib.suppress(CorruptDataError):
            client.upsert("t", rows)
            return
    raise AssertionError("it does not mend itself")


def _until_mended(client: StreamhouseClient, expected: dict[int, str]) -> None:
    for _ in range(10_000):
        if _asked(client, expected) == 0:
            return
    raise AssertionError("it does not mend itself")


@pytest.mark.parametrize("is_running", [False, True])
def test_flipped_bits_are_refused_and_mended(tmp_path: Path, is_running: bool) -> None:
    data, chance = tmp_path / "data", random.Random(7)
    expected = {i: f"a {i}" for i in range(KEYS)}
    service = ServiceProcess(data, *OPTIONS)
    with service, StreamhouseClient(service.endpoint) as client:
        client.create_table("t", SCHEMA, primary_key=["id"], bucket_count=1)
        client.upsert("t", _rows(range(KEYS), "a"))
        assert service.terminate() == 0
    for number in range(3):
        if not is_running:
            _flip(data, chance)
        service = ServiceProcess(data, *OPTIONS)
        with service, StreamhouseClient(service.endpoint) as client:
            if is_running:
                _flip(data, chance)
            _asked(client, expected)
            ids = range(number * 700, number * 700 + 900)
            _until_taken(client, _rows(ids, f"b{number}"))
            expected |= {i: f"b{number} {i}" for i in ids}
            _until_mended(client, expected)
            assert client.count("t") == len(expected)
            kinds = client.read("t$changelog").column("__change_type").to_pylist()
            assert kinds.count("+I") == KEYS + 5 * number
            gone = range(number * 10, number * 10 + 5)
            client.delete("t", pa.table({"id": gone}))
            for i in gone:
                del expected[i]
            assert _asked(client, expected) == 0
            client.upsert("t", _rows(gone, "c"))
            expected |= {i: f"c {i}" for i in gone}
            assert service.terminate() == 0
    streamhouse("check", "--data-dir", data)
