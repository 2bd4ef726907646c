"""A file that the owner's disk has lost or changed: checkpoints have it from the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamhouse.storage_service.ownership.journal.store._file_store import FileObjectStore
from tests.support.restore_world import Owner, files

LOG = "tables/1/bucket-0/00000000000000000000.log"
STATE = "tables/1/table.json"


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    owner = Owner(tmp_path / "a", FileObjectStore(tmp_path / "store"))
    owner.filesystem.make_directory((tmp_path / "a" / LOG).parent)
    owner.replace(STATE, b"{}")
    owner.replace(LOG, b"header")
    owner.append(LOG, b"synced")
    return owner


def _damage(path: Path, *, is_gone: bool) -> None:
    if is_gone:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[::-1])


def _restored(owner: Owner, tmp_path: Path) -> dict[str, bytes]:
    """Return what an empty directory becomes, after the owner's last checkpoint alone."""
    owner.stop()
    Owner(tmp_path / "b", owner.store, seed=1).die()
    return files(tmp_path / "b")


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize("path", [LOG, STATE])
@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_checkpoint_has_a_damaged_file_as_it_was_written(
    tmp_path: Path, owner: Owner, path: str, is_gone: bool, has_checkpoint: bool
) -> None:
    if has_checkpoint:
        assert owner.job.take()
        owner.replace(STATE, b'{"a": 1}')
        owner.append(LOG, b", and more")
        # As if its pack was mostly dead: all of it is read again.
        owner.taker.packs.clear()
    expected = files(tmp_path / "a")
    _damage(tmp_path / "a" / path, is_gone=is_gone)

    assert owner.job.take()

    assert set(owner.taker.damaged) == {path}
    assert _restored(owner, tmp_path) == expected


def test_checkpoints_go_on_and_trim_and_the_file_is_named_once(
    tmp_path: Path, owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    _damage(tmp_path / "a" / STATE, is_gone=False)
    for number in range(4):
        owner.append(LOG, b"%d" % number)
        assert owner.job.take()
        owner.taker.packs.clear()
    assert [line for line in caplog.messages if "event=damaged_file" in line] == [
        line for line in caplog.messages if STATE in line
    ]
    assert len([line for line in caplog.messages if "event=damaged_file" in line]) == 1
    expected = {**files(tmp_path / "a"), STATE: b"{}"}

    assert _restored(owner, tmp_path) == expected


def test_a_file_that_is_written_anew_is_damaged_no_more(tmp_path: Path, owner: Owner) -> None:
    _damage(tmp_path / "a" / STATE, is_gone=False)
    assert owner.job.take()
    owner.replace(STATE, b"again")

    assert owner.job.take()

    assert not owner.taker.damaged
    owner.die()
