"""Data directories of every format still open: what was acknowledged in them is there.

Each is what `attacked_directory.build` makes, as the release made it that had the format last.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.format_upgrade import upgrade_files
from streamhouse.storage_service.directory.table_registry import TableRegistry
from tests.support.attacked_directory import Acknowledged, judge

GOLDEN = Path(__file__).parent


@pytest.mark.parametrize("version", ["data_directory_v1", "data_directory_v2"])
async def test_a_data_directory_of_this_format_is_served(tmp_path: Path, version: str) -> None:
    data_dir, acknowledged = _unpacked(tmp_path, version)

    for _ in range(2):
        await _check_right(data_dir, acknowledged)


@pytest.mark.parametrize("sealed_tables", range(3))
async def test_an_upgrade_that_was_cut_off_goes_on(tmp_path: Path, sealed_tables: int) -> None:
    """service.json is of the new format already, and so are the files of some tables."""
    data_dir, acknowledged = _unpacked(tmp_path, "data_directory_v1")
    directory = DataDirectory.open(data_dir)
    registry = TableRegistry(directory, databases_max=10, tables_max=10, buckets_max=100)
    for info in registry.tables()[:sealed_tables]:
        upgrade_files(directory, info)
    directory.close()
    assert json.loads(directory.service_file.read_text())["format"] == 2

    for _ in range(2):
        await _check_right(data_dir, acknowledged)


async def test_a_file_of_before_the_upgrade_is_none_any_more(tmp_path: Path) -> None:
    data_dir, acknowledged = _unpacked(tmp_path, "data_directory_v1")
    former = (data_dir / "tables" / "1" / "lake.json").read_bytes()
    await _check_right(data_dir, acknowledged)
    (data_dir / "tables" / "1" / "lake.json").write_bytes(former)

    verdicts = await judge(data_dir, acknowledged)

    assert "it is no state file with a checksum" in verdicts.pop("default.events").why
    assert {verdict.how for verdict in verdicts.values()} == {"right"}


def _unpacked(folder: Path, version: str) -> tuple[Path, Acknowledged]:
    with tarfile.open(GOLDEN / version / "data_directory.tar.xz") as archive:
        archive.extractall(folder)  # ours; Python 3.11.2 has no filter
    known = json.loads((GOLDEN / version / "acknowledged.json").read_text(encoding="utf-8"))
    return folder / "data_directory", Acknowledged.from_json(known)


async def _check_right(data_dir: Path, acknowledged: Acknowledged) -> None:
    verdicts = await judge(data_dir, acknowledged)
    assert {how: verdict.how for how, verdict in verdicts.items()} == dict.fromkeys(
        ["", *acknowledged.tables], "right"
    )
