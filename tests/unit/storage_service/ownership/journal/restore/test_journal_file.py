"""A directory whose service goes on in a journal is not served without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamhouse.core.errors import InvalidRequestError
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.ownership.journal.restore.journal_file import (
    JournalFile,
    Phase,
    refuse_without_journal,
)


def _journalled(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    known = JournalFile(service_id="s", shard="0", epoch=1, nonces=(), places=(), phase=Phase.READY)
    known.save(directory, LocalFilesystem())


def test_a_directory_with_a_journal_is_refused_without_it(tmp_path: Path) -> None:
    refuse_without_journal(tmp_path)
    _journalled(tmp_path)

    with pytest.raises(InvalidRequestError, match="use --journal"):
        refuse_without_journal(tmp_path)


def test_a_directory_of_shards_is_refused_without_their_journal(tmp_path: Path) -> None:
    """A new, empty service was begun beside them, which then stood in the way of shard 0."""
    _journalled(tmp_path / "shards" / "0")

    with pytest.raises(InvalidRequestError, match=r"use --shards and --journal as before"):
        refuse_without_journal(tmp_path)


def test_a_directory_that_has_parted_from_its_journal_is_served(tmp_path: Path) -> None:
    (tmp_path / "service.json").touch()
    _journalled(tmp_path / "shards" / "1")

    refuse_without_journal(tmp_path)
