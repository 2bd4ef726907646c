"""`check --journal`, and what `backup` and `restore` make of a directory that has a journal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from streamhouse.cli.server_commands import backup, check, restore
from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.ownership.journal.store._file_store import FileObjectStore
from streamhouse.storage_service.ownership.journal.store.object_store import StoreUnavailableError
from tests.support.in_process_service import event_rows, make_table, routed
from tests.support.journalled_engine import journalled_engine, logged_ids
from tests.support.restore_world import NAMES, Owner


def _check(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(
        check.command, ["--journal", f"file://{root / 'store'}", *arguments], catch_exceptions=False
    )


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    """A directory `a` with a journal in `store`, which an owner has left with a checkpoint."""
    owner = Owner(tmp_path / "a", FileObjectStore(tmp_path / "store"), seed=3)
    for _ in range(20):
        owner.step()
    owner.checkpoint()
    owner.step()
    owner.stop()
    return owner


def test_a_sound_journal(owner: Owner, tmp_path: Path) -> None:
    done = _check(tmp_path, "--shard", "0")

    assert done.exit_code == 0, done.output
    assert "of shard '0' is sound: " in done.output
    assert "1 checkpoints" in done.output

    said = json.loads(_check(tmp_path, "--shard", "0", "--json").output)

    assert said["is_sound"] is True
    assert (said["shard"], said["checkpoints"], said["findings"]) == ("0", 1, [])


def test_a_damaged_journal(owner: Owner, tmp_path: Path) -> None:
    (pack, *_) = (tmp_path / "store" / NAMES.packs).iterdir()
    data = bytearray(pack.read_bytes())
    data[0] ^= 1
    pack.write_bytes(data)

    done = _check(tmp_path)

    assert done.exit_code == 1
    assert "DAMAGED" in done.output
    assert pack.name in done.output
    said = _check(tmp_path, "--json")
    assert said.exit_code == 1
    assert json.loads(said.output)["is_sound"] is False


def test_a_shard_that_is_not_there(owner: Owner, tmp_path: Path) -> None:
    done = _check(tmp_path, "--shard", "other")

    assert done.exit_code == 1
    assert "there is no journal" in done.output


def test_a_directory_or_a_journal_is_checked(tmp_path: Path) -> None:
    assert CliRunner().invoke(check.command, []).exit_code == 2
    assert _check(tmp_path, "--data-dir", str(tmp_path)).exit_code == 2


async def _filled(data_dir: Path, store: FileObjectStore) -> list[list[int]]:
    async with journalled_engine(data_dir, store) as engine:
        table = await make_table(engine.manager, is_keyed=False)
        for number in range(5):
            rows = event_rows(10 * number, 10 * number + 10)
            await engine.manager.append(table, [routed(0, rows), routed(1, rows)])
        await engine.checkpoint()
        return logged_ids(table)


class _AwayForBytes:
    """A store whose manifests are there, and whose packs are not."""

    def __init__(self, inner: FileObjectStore) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def get_range(self, key: str, *, start: int, length: int) -> memoryview:
        raise StoreUnavailableError(f"{key} is away")


def _run(command: click.Command, arguments: Sequence[object]) -> None:
    CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)


async def test_half_of_a_restore_is_not_backed_up(tmp_path: Path) -> None:
    store = FileObjectStore(tmp_path / "store")
    await _filled(tmp_path / "a", store)
    half = tmp_path / "half"
    with pytest.raises(StoreUnavailableError):
        async with journalled_engine(half, _AwayForBytes(store)):  # type: ignore[arg-type]
            pass
    # What a restore that was broken off later would have.
    shutil.copy(tmp_path / "a" / "service.json", half)

    with pytest.raises(InvalidRequestError, match="is not what its journal says yet"):
        _run(backup.command, ["--data-dir", half, "--to", tmp_path / "backup"])

    assert not (tmp_path / "backup").exists()
    async with journalled_engine(half, store):
        pass
    _run(backup.command, ["--data-dir", half, "--to", tmp_path / "backup"])
    _run(restore.command, ["--from", tmp_path / "backup"])


async def test_a_restored_backup_is_no_part_of_the_journal_and_begins_its_own(
    tmp_path: Path,
) -> None:
    store = FileObjectStore(tmp_path / "store")
    ids = await _filled(tmp_path / "a", store)
    _run(backup.command, ["--data-dir", tmp_path / "a", "--to", tmp_path / "backup"])
    _run(restore.command, ["--from", tmp_path / "backup", "--data-dir", tmp_path / "b"])
    before = check.check_journal(store, NAMES).to_json()

    with pytest.raises(InvalidRequestError, match="never had a journal"):
        async with journalled_engine(tmp_path / "b", store):
            pass
    assert check.check_journal(store, NAMES).to_json() == before

    other = FileObjectStore(tmp_path / "other")
    async with journalled_engine(tmp_path / "b", other) as engine:
        assert engine.begun.is_upload
    async with journalled_engine(tmp_path / "c", other) as engine:
        assert logged_ids(engine.manager.table(TablePath.parse("events"))) == ids
    # Nor has the one that was backed up lost it.
    async with journalled_engine(tmp_path / "a", store) as engine:
        assert logged_ids(engine.manager.table(TablePath.parse("events"))) == ids
