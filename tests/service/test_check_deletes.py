"""`streamhouse check` on a lake whose files of deletes are damaged, in both format versions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from streamhouse.api.client import StreamhouseClient
from streamhouse.cli.server_commands.check import command
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
TABLES = {"a2": "2", "b2": "2", "a3": "3", "b3": "3"}


def _rows(start: int, end: int, name: str) -> pa.Table:
    ids = range(start, end)
    return pa.table({"id": ids, "name": [name] * len(ids)}, schema=SCHEMA)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with tables that have one live file of deletes each; of equal rows in pairs."""
    data = tmp_path_factory.mktemp("check") / "data"
    with ServiceProcess(data) as service, StreamhouseClient(service.endpoint) as client:
        for path, version in TABLES.items():
            properties = {
                "table.datalake.format-version": version,
                "table.datalake.auto-maintenance": "false",
            }
            client.create_table(path, SCHEMA, primary_key=["id"], properties=properties)
            client.upsert(path, _rows(0, 300, "a"))
            tier_once(client, path)
            client.upsert(path, _rows(100, 200, "b"))
            tier_once(client, path)
    return data


def _deletes(data: Path, path: str) -> Path:
    folder = data / "lake" / "warehouse" / "default" / path / "data"
    (file,) = [*folder.rglob("*.puffin"), *folder.rglob("*-deletes.parquet")]
    return file


def _lose(file: Path, _: Path) -> None:
    file.unlink()


def _cut(file: Path, _: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def _flip(file: Path, _: Path) -> None:
    content = bytearray(file.read_bytes())
    content[30] ^= 1
    file.write_bytes(content)


def _exchange(file: Path, other: Path) -> None:
    shutil.copy(other, file)


def _problems(data: Path, exit_code: int) -> list[str]:
    # The deletes are read with or without the rows.
    done = CliRunner().invoke(command, ["--data-dir", str(data), "--json"])
    assert done.exit_code == exit_code, done.output
    return [finding["problem"] for finding in json.loads(done.stdout)["findings"]]


@pytest.mark.parametrize(
    ("path", "damage", "problem"),
    [
        ("a2", _lose, "it is missing"),
        ("a2", _cut, "of its table's metadata; restore it from a copy"),
        # Compressed, the random names of files may differ in size.
        ("a2", _exchange, "restore it from a copy"),
        ("a3", _lose, "it is missing"),
        ("a3", _cut, "of its table's metadata; restore it from a copy"),
        ("a3", _flip, "the deletion vector is damaged: "),
        ("a3", _exchange, "is another one: it was written as"),
    ],
)
def test_damaged_deletes_are_found(
    data: Path, path: str, damage: Callable[[Path, Path], None], problem: str
) -> None:
    file = _deletes(data, path)
    content = file.read_bytes()
    assert _problems(data, 0) == []

    damage(file, _deletes(data, path.replace("a", "b")))

    try:
        (found,) = _problems(data, 1)
    finally:
        file.write_bytes(content)
    assert problem in found
    assert file.name in found
