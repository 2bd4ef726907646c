"""What no checkpoint needs is deleted, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamhouse.storage_service.ownership.journal.names import Place
from streamhouse.storage_service.ownership.journal.object_format import (
    OBJECT_BYTES_MAX,
    decode_object,
)
from streamhouse.storage_service.ownership.journal.restore.journalled_state import (
    list_checkpoints,
    load_manifest,
)
from streamhouse.storage_service.ownership.journal.store._file_store import FileObjectStore
from tests.support.restore_world import NAMES, Owner, files


def test_a_store_stays_bounded_and_restores(tmp_path: Path) -> None:
    store = FileObjectStore(tmp_path / "store")
    owner = Owner(tmp_path / "a", store)
    sizes: list[int] = []
    for _ in range(12):
        for _ in range(15):
            owner.step()
        owner.checkpoint()
        listed = store.list_objects(NAMES.journal)
        sizes.append(len([e for e in listed if not e.key.endswith("/000000000000")]))
    owner.wait_stored()
    owner.die()

    assert len(list_checkpoints(store, NAMES)) == 2
    # Two rounds of operations, and the seals.
    assert max(sizes) < 15 * 4 * 2 + 12
    Owner(tmp_path / "b", store, seed=1).die()
    assert files(tmp_path / "b") == files(tmp_path / "a")


def test_every_epoch_keeps_what_opens_it_and_its_seal(tmp_path: Path) -> None:
    store = FileObjectStore(tmp_path / "store")
    for number in range(3):
        owner = Owner(tmp_path / "a", store, seed=number)
        for _ in range(4):
            for _ in range(5):
                owner.step()
            owner.checkpoint()
        owner.stop()

    newest = max(
        place.epoch
        for entry in store.list_objects(NAMES.journal)
        if (place := NAMES.place_of_object(entry.key))
    )
    assert newest > 8
    for epoch in range(2, newest + 1):
        key = NAMES.object(Place(epoch, 0))
        data = store.get(key, bytes_max=OBJECT_BYTES_MAX)
        seal = decode_object(data, key=key, place=Place(epoch, 0)).facts["previous_seal_seq"]
        store.get(NAMES.object(Place(epoch - 1, seal)), bytes_max=OBJECT_BYTES_MAX)


def test_packs_that_a_checkpoint_names_or_that_are_new_stay(tmp_path: Path) -> None:
    store = FileObjectStore(tmp_path / "store")
    owner = Owner(tmp_path / "a", store)
    under_way = NAMES.pack("00000099-000000000000")
    left_over = NAMES.pack("00000000-000000000000")
    for key in (under_way, left_over):
        store.replace(key, b"x")
    for _ in range(4):
        for _ in range(10):
            owner.step()
        owner.checkpoint()
    owner.die()

    packs = {entry.key for entry in store.list_objects(NAMES.packs)}
    named = {
        NAMES.pack(name)
        for place in list_checkpoints(store, NAMES)
        for name in load_manifest(store, NAMES, place).packs
    }
    assert named < packs
    assert under_way in packs
    assert left_over not in packs


@pytest.mark.parametrize("seed", range(3))
def test_a_checkpoint_that_is_damaged_is_passed_over_for_the_one_before(
    tmp_path: Path, seed: int
) -> None:
    store = FileObjectStore(tmp_path / "store")
    owner = Owner(tmp_path / "a", store, seed)
    for _ in range(4):
        for _ in range(12):
            owner.step()
        owner.checkpoint()
    owner.wait_stored()
    owner.die()
    newest = tmp_path / "store" / NAMES.checkpoint(list_checkpoints(store, NAMES)[-1])
    newest.write_bytes(newest.read_bytes()[:-1])

    Owner(tmp_path / "b", store, seed=99).die()

    assert files(tmp_path / "b") == files(tmp_path / "a")
