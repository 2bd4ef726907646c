"""What a later release has written is refused with one sentence, and stays as it is."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from crc32c import crc32c

from streamhouse.client import StorageClient
from streamhouse.core.errors import (
    CorruptDataError,
    InvalidRequestError,
    TableDamagedError,
)
from streamhouse.reading.files.append_position import AppendPosition
from streamhouse.reading.follow.stream_position import StreamPosition
from streamhouse.storage_service.ownership.journal.names import Place
from streamhouse.storage_service.ownership.journal.object_format import decode_object
from streamhouse.storage_service.ownership.journal.restore.journalled_state import list_checkpoints
from streamhouse.storage_service.ownership.journal.store._file_store import FileObjectStore
from tests.support.command_line import streamhouse
from tests.support.restore_world import NAMES, Owner, files
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden"
ROWS = pa.table({"id": [1, 2, 3]})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with two tables, stopped."""
    data_dir = tmp_path_factory.mktemp("written") / "data"
    with ServiceProcess(data_dir) as service, StorageClient(service.endpoint) as client:
        for name in ("a", "b"):
            client.create_table(name, ROWS.schema)
            client.append(name, ROWS)
        assert service.terminate() == 0
    return data_dir


@pytest.fixture
def data_dir(written: Path, tmp_path: Path) -> Path:
    copied = tmp_path / "data"
    _copy(written, copied)
    return copied


def _copy(source: Path, target: Path) -> None:
    target.mkdir(mode=0o700)
    for path in source.iterdir():
        if path.is_dir():
            _copy(path, target / path.name)
        else:
            (target / path.name).write_bytes(path.read_bytes())


def _raise_format(path: Path) -> bytes:
    """Write a state file as a release with the next format would; returns its bytes."""
    value: dict[str, Any] = json.loads(path.read_bytes())
    del value["crc32c"]
    value["format"] += 1
    text = json.dumps(value, sort_keys=True, separators=(",\n", ": "))
    path.write_text(f'{{"crc32c": "{crc32c(text.encode()):08x}",\n{text[1:]}\n')
    return path.read_bytes()


def test_a_service_does_not_start_on_a_newer_data_directory(data_dir: Path) -> None:
    newer = _raise_format(data_dir / "service.json")

    refused = streamhouse("serve", "--data-dir", data_dir, "--port", 0, expect=1)

    [line] = [text for text in refused.stderr.splitlines() if "level=" not in text]
    assert "service.json has format 3, which this release cannot read" in line
    assert "of another version of Streamhouse" in line
    assert (data_dir / "service.json").read_bytes() == newer


@pytest.mark.parametrize("pattern", ["table.json", "*.log"])
def test_a_table_of_a_newer_format_is_not_served_and_others_are(
    data_dir: Path, pattern: str
) -> None:
    path = sorted(data_dir.glob(f"tables/**/{pattern}"))[0]
    if pattern == "table.json":
        newer = _raise_format(path)
    else:
        # The header ends with its checksum; bytes 4 and 5 are the version, 6 and 7 its length.
        data = bytearray(path.read_bytes())
        (length,) = struct.unpack_from("<H", data, 6)
        struct.pack_into("<H", data, 4, 9)
        struct.pack_into("<I", data, length - 4, crc32c(bytes(data[: length - 4])))
        newer = bytes(data)
        path.write_bytes(newer)

    with (
        ServiceProcess(data_dir) as service,
        StorageClient(service.endpoint) as client,
    ):
        with pytest.raises(TableDamagedError, match="which this release cannot read"):
            client.append("a", ROWS)
        client.append("b", ROWS)

    assert path.read_bytes() == newer


def test_an_object_of_a_newer_journal_is_refused() -> None:
    key = "shards/0/journal/00000001/000000000001"
    data = bytearray((GOLDEN / "journal_v1" / key).read_bytes())
    header = struct.calcsize("<4sBBHQQ16s16sIIQI8x")
    data[4] += 1
    struct.pack_into("<I", data, header, crc32c(bytes(data[:header])))

    with pytest.raises(CorruptDataError, match="of a version or kind that this release does not"):
        decode_object(bytes(data), key=key, place=Place(1, 1))


def _raise_checkpoints(store: FileObjectStore, folder: Path, count: int) -> None:
    """Write the newest checkpoints as a release with the next format would."""
    for place in list_checkpoints(store, NAMES)[-count:]:
        path = folder / NAMES.checkpoint(place)
        data = bytearray(path.read_bytes())
        struct.pack_into("<H", data, 4, struct.unpack_from("<H", data, 4)[0] + 1)
        path.write_bytes(data)


@pytest.mark.parametrize("count", [1, 2])
def test_a_newer_checkpoint_of_the_journal_is_passed_over(tmp_path: Path, count: int) -> None:
    """Where no older one is left, nothing can be restored, and that is said."""
    store = FileObjectStore(tmp_path / "store")
    owner = Owner(tmp_path / "a", store, 1)
    for _ in range(4):
        for _ in range(12):
            owner.step()
        owner.checkpoint()
    owner.wait_stored()
    owner.die()
    _raise_checkpoints(store, tmp_path / "store", count)

    if count == 1:
        Owner(tmp_path / "b", store, seed=99).die()
        assert files(tmp_path / "b") == files(tmp_path / "a")
        return
    with pytest.raises(CorruptDataError, match="has format 2, which this release cannot read"):
        Owner(tmp_path / "b", store, seed=99)


def test_a_newer_position_in_an_iceberg_table_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="has version 2, but this Streamhouse reads 1"):
        AppendPosition.from_json({"version": 2}, table="db.t", table_uuid="u")


def test_a_newer_backup_is_refused(data_dir: Path, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    streamhouse("backup", "--data-dir", data_dir, "--to", backup)
    manifest = json.loads((backup / "manifest.json").read_text())
    manifest["format_version"] += 1
    (backup / "manifest.json").write_text(json.dumps(manifest))

    refused = streamhouse("restore", "--from", backup, expect=1)

    assert "has backup format 2, which this release cannot read" in refused.stderr


def test_a_newer_checkpoint_of_a_stream_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="has version 9, but this Streamhouse reads"):
        StreamPosition.from_json({"version": 9}, table="db.t", table_id=1)
