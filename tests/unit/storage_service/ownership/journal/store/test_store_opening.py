"""Which `file://` journals are refused beside a data directory."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from streamhouse.core.errors import InvalidRequestError
from streamhouse.storage_service.ownership.journal.store.store_opening import refuse_within


def _refused(journal: Path, data: Path) -> bool:
    try:
        refuse_within(f"file://{quote(str(journal))}", data)
    except InvalidRequestError as error:
        return "lie in one another" in error.message
    return False


@pytest.mark.parametrize(
    ("journal", "data", "is_refused"),
    [
        ("data/journal", "data", True),
        ("data", "data", True),
        ("data", "data/shards/0", True),
        ("data/../data/a b", "data", True),
        ("journal", "data", False),
        ("data-journal", "data", False),
    ],
)
def test_a_journal_and_a_directory_in_one_another_are_refused(
    tmp_path: Path, journal: str, data: str, is_refused: bool
) -> None:
    assert _refused(tmp_path / journal, tmp_path / data) is is_refused


def test_so_are_those_that_a_link_leads_into_one_another(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "elsewhere").symlink_to(tmp_path / "data")

    assert _refused(tmp_path / "elsewhere" / "journal", tmp_path / "data")
    assert _refused(tmp_path / "data", tmp_path / "elsewhere" / "shard")


def test_a_directory_given_by_a_relative_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert _refused(tmp_path / "data" / "journal", Path("data"))


def test_another_store_is_no_directory(tmp_path: Path) -> None:
    refuse_within("s3://bucket/journal", tmp_path)
