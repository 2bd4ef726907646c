"""Each file of a table that a later release has written: the table is refused, the others are not.

Nothing of such a table is changed, so that the later release finds all of it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from tests.support.in_process_service import (
    EVENTS,
    InProcessService,
    append_body,
    event_rows,
    in_process_service,
)

_HEADER_BYTES = 64


def _body(start: int, end: int) -> bytes:
    return append_body(EVENTS, [(None, 0, event_rows(start, end))])


async def _write_all(data_dir: Path) -> None:
    """Make a table with every file that one can have, and another table."""
    async with in_process_service(data_dir) as service:
        await service.create_table("all", primary_key=("id",))
        await service.create_table("other")
        assert (await service.call("POST", "/v1/tables/all/upsert", body=_body(0, 3))).status == 200
        url = "/v1/tables/all/transactions"
        begun = await service.call("POST", url, json_body={"operation": "upsert"})
        here = f"{url}/{begun.json()['transaction_id']}"
        staged = await service.call("POST", f"{here}/stage", body=_body(3, 6))
        parts = {"parts": [staged.json()["part"]]}
        for answer in (
            await service.call("POST", f"{here}/commit", json_body=parts),
            await service.call("POST", url, json_body={"operation": "upsert"}),
            await service.call(
                "PUT",
                "/v1/tables/all/consumers/billing",
                json_body={"table_id": 1, "offsets": {"0": 2}},
            ),
            await service.call(
                "PUT",
                "/v1/tables/all/lake/pins/me",
                json_body={"snapshot_id": "1", "ttl_ms": 100_000},
            ),
        ):
            assert answer.status in (200, 201), answer.body


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data_dir = tmp_path_factory.mktemp("written") / "data"
    asyncio.run(_write_all(data_dir))
    return data_dir


def _newer_state(path: Path) -> None:
    value: dict[str, Any] = json.loads(path.read_bytes())
    del value["crc32c"]
    value["format"] += 1
    text = json.dumps(value, sort_keys=True, separators=(",\n", ": "))
    path.write_text(f'{{"crc32c": "{crc32c(text.encode()):08x}",\n{text[1:]}\n')


def _newer_header(path: Path) -> None:
    """Of a segment, an index or a mark: bytes 4 and 5 are the version, the last four a checksum."""
    data = bytearray(path.read_bytes())
    for start in range(0, _HEADER_BYTES if path.suffix == ".log" else len(data), _HEADER_BYTES):
        struct.pack_into("<H", data, start + 4, 9)
        body = bytes(data[start : start + _HEADER_BYTES - 4])
        struct.pack_into("<I", data, start + _HEADER_BYTES - 4, crc32c(body))
    path.write_bytes(data)


def _newer_frame(path: Path) -> None:
    """The version is byte 12 of a frame, its checksum is of bytes 8 to the end of the payload."""
    data = bytearray(path.read_bytes())
    start = _HEADER_BYTES
    (length,) = struct.unpack_from("<I", data, start + 8)
    data[start + 12] += 1
    checked = bytes(data[start + 8 : start + _HEADER_BYTES + length])
    struct.pack_into("<I", data, start + 4, crc32c(checked))
    path.write_bytes(data)


async def _write(service: InProcessService, verb: str, table: str) -> tuple[int, Any]:
    answer = await service.call("POST", f"/v1/tables/{table}/{verb}", body=_body(7, 9))
    return answer.status, answer.json()


@pytest.mark.parametrize(
    ("pattern", "raise_format"),
    [
        ("table.json", _newer_state),
        ("lake.json", _newer_state),
        ("lake_pins.json", _newer_state),
        ("consumers.json", _newer_state),
        ("transactions/*.decision", _newer_state),
        ("transactions/*.open", _newer_state),
        ("transactions/outcomes", _newer_state),
        ("transactions/truncated", _newer_state),
        ("bucket-0/*.log", _newer_header),
        ("bucket-0/*.log", _newer_frame),
        ("bucket-0/durable.mark", _newer_header),
    ],
)
async def test_a_table_with_a_newer_file_is_refused_alone(
    written: Path, tmp_path: Path, pattern: str, raise_format: Callable[[Path], None]
) -> None:
    data_dir = tmp_path / "data"
    shutil.copytree(written, data_dir, copy_function=shutil.copyfile)
    data_dir.chmod(0o700)
    [path] = data_dir.glob(f"tables/1/{pattern}")
    raise_format(path)
    newer = path.read_bytes()

    async with in_process_service(data_dir) as service:
        status, refused = await _write(service, "upsert", "all")
        assert (await _write(service, "append", "other"))[0] == 200

    assert (status, refused["error"]["code"]) == (500, "table_damaged"), refused
    assert "this release cannot read" in refused["error"]["message"]
    assert path.read_bytes() == newer
