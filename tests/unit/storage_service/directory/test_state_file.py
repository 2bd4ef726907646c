"""Small files that are replaced as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamhouse.core.errors import CorruptDataError, StorageFailedError
from streamhouse.storage_service.directory.state_file import read_json, replace_json
from streamhouse.storage_service.log.filesystem import LocalFilesystem


def test_the_last_value_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "value.json"

    replace_json(LocalFilesystem(), path, {"number": 1})
    replace_json(LocalFilesystem(), path, {"number": 2})

    assert read_json(path) == {"number": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["value.json"]


def test_a_crash_before_the_rename_leaves_the_old_value(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    replace_json(LocalFilesystem(), path, {"number": 1})

    (tmp_path / "value.json.tmp").write_text('{"numb')

    assert read_json(path) == {"number": 1}
    replace_json(LocalFilesystem(), path, {"number": 2})
    assert read_json(path) == {"number": 2}


def test_a_write_that_fails_says_which_file_and_keeps_the_old_value(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    replace_json(LocalFilesystem(), path, {"number": 1})
    (tmp_path / "value.json.tmp").mkdir()

    with pytest.raises(StorageFailedError, match=r"cannot write value\.json: Is a directory"):
        replace_json(LocalFilesystem(), path, {"number": 2})

    assert read_json(path) == {"number": 1}


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00\x00"])
def test_other_contents_are_corrupt(tmp_path: Path, text: str) -> None:
    path = tmp_path / "value.json"
    path.write_text(text)

    with pytest.raises(CorruptDataError, match=r"value\.json"):
        read_json(path)
