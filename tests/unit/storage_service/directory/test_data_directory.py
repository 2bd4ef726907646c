"""One process at a time uses a data directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamhouse.core.errors import InvalidRequestError, UnavailableError
from streamhouse.storage_service.directory.data_directory import DataDirectory


def test_a_second_owner_is_refused_by_the_first_ones_process_id(tmp_path: Path) -> None:
    first = DataDirectory.open(tmp_path / "data")

    with pytest.raises(UnavailableError, match=f"in use by another .* \\(process {os.getpid()}\\)"):
        DataDirectory.open(tmp_path / "data")

    first.close()


def test_closing_gives_the_directory_up_and_may_be_repeated(tmp_path: Path) -> None:
    first = DataDirectory.open(tmp_path)
    first.close()
    first.close()

    DataDirectory.open(tmp_path).close()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")

    with pytest.raises(InvalidRequestError, match=r"data directory .*/data cannot be used"):
        DataDirectory.open(tmp_path / "data")


def test_paths_are_made_of_ids_only(tmp_path: Path) -> None:
    directory = DataDirectory.open(tmp_path)

    assert directory.bucket(7, 3) == tmp_path / "tables" / "7" / "bucket-3"
    assert directory.lake_file(7).path == tmp_path / "tables" / "7" / "lake.json"
    directory.close()
