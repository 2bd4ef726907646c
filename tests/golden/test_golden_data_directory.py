"""Data directories of every format still open: what was acknowledged in them is there.

Each is what `attacked_directory.build` makes, as the release made it that had the format last.
"""

from __future__ import annotations

import asyncio
import json
import tarfile
from pathlib import Path

import pytest

from tests.support.attacked_directory import Acknowledged, judge

GOLDEN = Path(__file__).parent


@pytest.mark.parametrize("version", ["data_directory_v1", "data_directory_v2"])
def test_a_data_directory_of_this_format_is_served(tmp_path: Path, version: str) -> None:
    with tarfile.open(GOLDEN / version / "data_directory.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    known = json.loads((GOLDEN / version / "acknowledged.json").read_text(encoding="utf-8"))
    acknowledged = Acknowledged.from_json(known)

    for _ in range(2):
        verdicts = asyncio.run(judge(tmp_path / "data_directory", acknowledged))
        assert {how: verdict.how for how, verdict in verdicts.items()} == dict.fromkeys(
            ["", *acknowledged.tables], "right"
        )
