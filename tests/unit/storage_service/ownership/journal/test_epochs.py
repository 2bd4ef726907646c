"""Epochs as those who take over, or wait, see them."""

from __future__ import annotations

from typing import Any

from streamhouse.storage_service.ownership.journal.epochs import SealReason, find_seal, seal_epoch
from streamhouse.storage_service.ownership.journal.steps import Step, Steps, do, run
from tests.support.journal_world import NAMES, taken
from tests.support.memory_store import MemoryStore


def _do(store: MemoryStore, steps: Steps[Any]) -> Any:
    def step(one: Step) -> Any:
        return do(store, one)

    return run(steps, step)


def test_an_epoch_has_a_seal_once_it_has_ended() -> None:
    store = MemoryStore()
    assert _do(store, find_seal(NAMES, 1)) is None
    tenure = taken(store)
    assert _do(store, find_seal(NAMES, 1)) is None

    sealed = _do(store, seal_epoch(NAMES, 1, nonce=tenure.nonce, reason=SealReason.STOPPED))

    found = _do(store, find_seal(NAMES, 1))
    assert found == sealed
    assert found.reason == SealReason.STOPPED
