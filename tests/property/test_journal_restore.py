"""A directory that is restored has the files that its journal says, whatever it had before."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.ownership.journal.names import Place
from streamhouse.storage_service.ownership.journal.store._file_store import FileObjectStore
from streamhouse.storage_service.ownership.journal.store.object_store import StoreUnavailableError
from tests.support.journalled_engine import Gate
from tests.support.restore_world import Owner, files


@pytest.mark.parametrize("seed", range(6))
def test_an_empty_directory_becomes_what_was_stored(tmp_path: Path, seed: int) -> None:
    store = FileObjectStore(tmp_path / "store")
    owner = Owner(tmp_path / "a", store, seed)
    for number in range(60):
        owner.step()
        if number % 25 == 20:
            owner.checkpoint()
    owner.wait_stored()
    owner.die()

    other = Owner(tmp_path / "b", store, seed + 1)
    other.die()

    assert files(tmp_path / "b") == files(tmp_path / "a")


def run_era(owner: Owner, gate: Gate, *, steps: int, ahead: int) -> dict[str, bytes]:
    """Let a service do something, then what the journal never gets; return what the journal has."""
    for _ in range(steps):
        owner.step()
        if not owner.rng.randrange(12):
            owner.checkpoint()
    owner.wait_stored()
    stored = files(owner.directory)
    gate.is_shut = True
    for _ in range(ahead):
        logs = sorted(path for path in files(owner.directory) if path.endswith(".log"))
        if logs and owner.rng.randrange(4):
            owner.append(owner.rng.choice(logs), owner.rng.randbytes(20))
        elif logs:
            owner.remove(owner.rng.choice(logs))
    owner.die()
    return stored


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_copies_that_are_behind_ahead_or_astray_become_what_the_journal_says(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("eras")
    store = FileObjectStore(root / "store")
    stored: dict[str, bytes] = {}
    last = ""
    for number in range(data.draw(st.integers(1, 5), label="eras")):
        name = data.draw(st.sampled_from("aab") | st.just(f"new{number}"), label="directory")
        local = files(root / name) if (root / name).exists() else {}
        gate = Gate(store)
        # Two processes of one nonce would be taken for one.
        seed = data.draw(st.integers(0, 1 << 16), label="seed") * 8 + number
        owner = Owner(root / name, gate, seed=seed)

        expected = dict(stored)
        if name == last:
            for path, ours in local.items():
                if path in stored and path.endswith(".log") and len(ours) > len(stored[path]):
                    expected[path] = ours
        assert files(root / name) == expected
        owner.journal_tails()

        steps = data.draw(st.integers(0, 25), label="steps")
        ahead = data.draw(st.integers(0, 6), label="ahead")
        stored, last = run_era(owner, gate, steps=steps, ahead=ahead), name
    shutil.rmtree(root)


@pytest.mark.parametrize("seed", range(3))
def test_the_journal_cut_at_any_object_gives_what_was_stored_by_then(
    tmp_path: Path, seed: int
) -> None:
    store = FileObjectStore(tmp_path / "store")
    owner = Owner(tmp_path / "a", store, seed)
    seen: dict[Place, dict[str, bytes]] = {}
    checkpoint = Place(1, 0)
    for number in range(30):
        owner.step()
        owner.wait_stored()
        seen[owner.writer.place_of(owner.writer.recorded_position)[0]] = files(owner.directory)
        if number == 12 and (manifest := owner.taker.take()):
            checkpoint = manifest.stored_until
    owner.die()

    for cut, expected in seen.items():
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        shutil.copytree(tmp_path / "store", tmp_path / "copy")
        for path in (tmp_path / "copy/shards/0/journal/00000001").iterdir():
            if int(path.name) >= cut.seq:
                path.unlink()
        copy = FileObjectStore(tmp_path / "copy")
        if cut < checkpoint:
            with pytest.raises(CorruptDataError, match="objects are missing"):
                Owner(tmp_path / "b", copy, seed + 1)
        else:
            Owner(tmp_path / "b", copy, seed + 1).die()
            assert files(tmp_path / "b") == expected, cut


class Failing:
    """A store that goes away after so many reads of packs and of the journal's operations."""

    def __init__(self, inner: FileObjectStore, reads: int) -> None:
        self._inner = inner
        self._left = reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise StoreUnavailableError("it went away")

    def get(self, key: str, *, bytes_max: int) -> memoryview:
        found = self._inner.get(key, bytes_max=bytes_max)
        if "/journal/" in key and not key.endswith("/000000000000"):
            # Each attempt that is given up leaves an epoch, which the next one reads.
            self._count()
        return found

    def get_range(self, key: str, *, start: int, length: int) -> memoryview:
        self._count()
        return self._inner.get_range(key, start=start, length=length)


@pytest.mark.parametrize("is_astray", [False, True])
def test_a_restore_that_is_broken_off_anywhere_and_repeated_gives_the_same(
    tmp_path: Path, is_astray: bool
) -> None:
    store = FileObjectStore(tmp_path / "store")
    if is_astray:
        gate = Gate(store)
        run_era(Owner(tmp_path / "b", gate, seed=3), gate, steps=30, ahead=6)
    owner = Owner(tmp_path / "a", store, seed=4)
    for number in range(40):
        owner.step()
        # Or it is chance how many objects there are to read.
        owner.wait_stored()
        if number == 20:
            owner.checkpoint()
    owner.die()

    for reads in range(120):
        try:
            again = Owner(tmp_path / "b", Failing(store, reads * 4), seed=10 + reads)
        except StoreUnavailableError:
            continue
        again.die()
        break

    assert reads > 3
    assert files(tmp_path / "b") == files(tmp_path / "a")
