"""A check says what is wrong with a journal, and nothing of one that is whole."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.operations.check_journal import check_journal
from streamhouse.storage_service.ownership.journal.checkpoints.key_files import KeyCopy
from streamhouse.storage_service.ownership.journal.checkpoints.manifest import encode_manifest
from streamhouse.storage_service.ownership.journal.names import Place, ShardNames
from streamhouse.storage_service.ownership.journal.restore.journalled_state import (
    list_checkpoints,
    load_manifest,
)
from streamhouse.storage_service.ownership.journal.store._file_store import FileObjectStore
from tests.support.restore_world import NAMES, Owner, files
from tests.support.seen_progress import SeenProgress


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal of two owners with four checkpoints, the directory of the last in `a`."""
    root = tmp_path_factory.mktemp("whole")
    store = FileObjectStore(root / "store")
    for seed in (4, 5):
        owner = Owner(root / "a", store, seed)
        for _ in range(2):
            for _ in range(20):
                owner.step()
            owner.checkpoint()
        for _ in range(10):
            owner.step()
        owner.stop()
    return root


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> FileObjectStore:
    """A copy of it."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    return FileObjectStore(tmp_path / "store")


def test_a_whole_journal_is_sound(store: FileObjectStore) -> None:
    report = check_journal(store, NAMES)

    assert report.is_sound, report.findings
    assert report.to_json()["findings"] == []
    assert report.checkpoints == 2
    assert report.packs_bytes > 0


def test_progress_comes_to_the_bytes_of_the_packs(store: FileObjectStore) -> None:
    seen = SeenProgress()

    report = check_journal(store, NAMES, progress=seen)

    assert seen.expected == sum(seen.steps) == report.packs_bytes
    assert len(seen.steps) > 2


def test_a_running_service_is_no_finding(store: FileObjectStore, tmp_path: Path) -> None:
    owner = Owner(tmp_path / "b", store, 6)
    owner.step()

    assert check_journal(store, NAMES).is_sound
    owner.die()


def test_what_is_written_while_a_check_reads_is_no_finding(
    store: FileObjectStore, tmp_path: Path
) -> None:
    owner = Owner(tmp_path / "b", store, 6)
    newer = NAMES.checkpoint(list_checkpoints(store, NAMES)[-1])

    class Busy(FileObjectStore):
        """Its owner goes on when the newer of two checkpoints is asked for."""

        def get(self, key: str, *, bytes_max: int) -> memoryview:
            if key == newer:
                for _ in range(20):
                    owner.step()
                owner.writer.wait_stored(owner.writer.recorded_position)
            return super().get(key, bytes_max=bytes_max)

    report = check_journal(Busy(tmp_path / "store"), NAMES)

    assert report.is_sound, report.findings
    owner.die()


def test_there_is_no_journal(tmp_path: Path) -> None:
    report = check_journal(FileObjectStore(tmp_path / "none"), ShardNames("other"))

    assert not report.is_sound


@pytest.mark.parametrize("what", ["a longer pack", "another service", "operations that are gone"])
def test_a_checkpoint_that_no_restore_takes_is_found(
    store: FileObjectStore, tmp_path: Path, what: str
) -> None:
    place = list_checkpoints(store, NAMES)[-1]
    manifest = load_manifest(store, NAMES, place)
    if what == "a longer pack":
        with (tmp_path / "store" / NAMES.pack(max(manifest.packs))).open("ab") as pack:
            pack.write(b"x")
    else:
        other = (
            replace(manifest, service_id="0" * 32)
            if what == "another service"
            else replace(manifest, applied=10**6)
        )
        store.replace(NAMES.checkpoint(place), encode_manifest(other))

    report = check_journal(store, NAMES)

    assert not report.is_sound
    owner = Owner(tmp_path / "b", store, seed=9)
    assert owner.begun.manifest is None or owner.begun.manifest.place != place
    owner.die()


def objects_of_each_kind(store: FileObjectStore) -> dict[str, str]:
    """Return the key of one object of every kind that a restore needs."""
    older, newer = list_checkpoints(store, NAMES)
    packs = load_manifest(store, NAMES, newer).packs
    last = [
        place for e in store.list_objects(NAMES.journal) if (place := NAMES.place_of_object(e.key))
    ]
    return {
        "newer manifest": NAMES.checkpoint(newer),
        "older manifest": NAMES.checkpoint(older),
        "pack": NAMES.pack(max(packs, key=lambda name: packs[name])),
        "operations": NAMES.object(Place(last[-1].epoch, 1)),
        "open": NAMES.object(Place(1, 0)),
        "seal": NAMES.object(last[-1]),
    }


KINDS = ("newer manifest", "older manifest", "pack", "operations", "open", "seal")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["gone", "flipped", "cut"])
def test_damage_is_found_and_never_restores_other_files(
    store: FileObjectStore, tmp_path: Path, kind: str, how: str
) -> None:
    path = tmp_path / "store" / objects_of_each_kind(store)[kind]
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) * 2 // 3] ^= 4
        path.write_bytes(data)

    report = check_journal(store, NAMES)

    # The seal of the newest epoch can be made again, and one manifest is as good as two.
    if how != "gone" or kind not in ("seal", "older manifest", "newer manifest"):
        assert not report.is_sound
    try:
        Owner(tmp_path / "b", store, seed=9).die()
    except CorruptDataError:
        return
    assert files(tmp_path / "b") == files(tmp_path / "a")


def test_an_epoch_whose_beginning_is_gone_is_found(store: FileObjectStore, tmp_path: Path) -> None:
    owner = Owner(tmp_path / "b", store, 6)
    owner.step()
    owner.wait_stored()
    owner.die()
    opened = NAMES.object(Place(owner.writer.epoch, 0))
    (tmp_path / "store" / opened).unlink()

    report = check_journal(store, NAMES)

    assert not report.is_sound
    assert opened in {finding.where for finding in report.findings}
    with pytest.raises(CorruptDataError, match="no open object"):
        Owner(tmp_path / "c", store, seed=9)


def test_an_object_that_lies_beyond_the_newest_epoch_is_found(
    store: FileObjectStore, tmp_path: Path
) -> None:
    stray = NAMES.object(Place(90, 3))
    (tmp_path / "store" / stray).parent.mkdir()
    shutil.copy(tmp_path / "store" / NAMES.object(Place(1, 0)), tmp_path / "store" / stray)

    report = check_journal(store, NAMES)

    assert not report.is_sound
    assert "epoch 90 has objects" in report.findings[0].problem


def test_a_damaged_pack_is_passed_over_for_the_checkpoint_before(
    store: FileObjectStore, tmp_path: Path
) -> None:
    """Its length is right, so only who reads it finds out; the start was refused for it."""
    older, newer = (load_manifest(store, NAMES, place) for place in list_checkpoints(store, NAMES))
    [pack] = sorted(set(newer.packs) - set(older.packs))
    _flip(tmp_path / "store" / NAMES.pack(pack))
    assert not check_journal(store, NAMES).is_sound

    for directory in ("b", "a"):
        before = files(tmp_path / directory)
        owner = Owner(tmp_path / directory, store, seed=9)
        owner.die()
        assert files(tmp_path / directory) == (before or files(tmp_path / "a"))
    assert owner.begun.manifest is not None


def test_damaged_rows_by_key_are_left_to_be_made_again(
    store: FileObjectStore, tmp_path: Path
) -> None:
    """They are in the lake or the changelog, too; the start was refused for them."""
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "000001.sst").write_bytes(b"row" * 1_000)
    bucket = "tables/1/bucket-0"
    owner = Owner(tmp_path / "a", store, 6, keys=[KeyCopy(bucket, 0, rows)])
    owner.replace(f"{bucket}/{0:020d}.writers", b"")
    for _ in range(2):
        owner.append(_log_of(owner, bucket), b"more")
        assert owner.checkpoint()
    owner.stop()
    newest = load_manifest(store, NAMES, list_checkpoints(store, NAMES)[-1])
    [of_keys] = [rows for rows in newest.key_rows if rows.bucket == bucket]
    whole = Owner(tmp_path / "b", store, seed=9)
    whole.stop()
    assert (tmp_path / "b" / bucket / "kv" / "000001.sst").read_bytes() == b"row" * 1_000
    _flip(tmp_path / "store" / NAMES.pack(of_keys.files[0].pieces[0].pack), at=-1)

    Owner(tmp_path / "c", store, seed=10).die()

    assert files(tmp_path / "c") == files(tmp_path / "a")
    assert not list((tmp_path / "c").rglob("kv*"))


def _log_of(owner: Owner, bucket: str) -> str:
    path = f"{bucket}/{0:020d}.log"
    if not (owner.directory / path).exists():
        owner.filesystem.make_directory(owner.directory / bucket)
        owner.replace(path, b"head")
    return path


def _flip(path: Path, *, at: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
