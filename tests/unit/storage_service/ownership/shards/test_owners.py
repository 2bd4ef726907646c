"""Where other shards answer, and whether somebody does, by what their leases say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from streamhouse.storage_service.ownership.journal.epochs import take
from streamhouse.storage_service.ownership.journal.names import ShardNames
from streamhouse.storage_service.ownership.journal.steps import do, run
from streamhouse.storage_service.ownership.journal.store._file_store import FileObjectStore
from streamhouse.storage_service.ownership.shards.owners import LeaseOwners, Owner

LEASE_MS = 10_000
NAMES = ShardNames("a")


class _World:
    """A shard whose owner renews its lease when the test says so, and a watcher's clock."""

    def __init__(self, tmp_path: Path) -> None:
        self.store = FileObjectStore(tmp_path)
        self.now_s = 1_000.0
        self.owners = LeaseOwners(self.store, lease_ms=LEASE_MS, clock=lambda: self.now_s)

    def take(self, epoch: int) -> None:
        steps: Any = take(NAMES, after=epoch - 1, endpoint="http://a:1", lease_ms=LEASE_MS)
        run(steps, lambda step: do(self.store, step))

    def renew(self, epoch: int, counter: int, endpoint: str = "http://a:1") -> None:
        lease = {"counter": counter, "endpoint": endpoint, "lease_ms": LEASE_MS}
        self.store.replace(NAMES.lease(epoch), json.dumps(lease).encode())

    def owner_after(self, seconds: float) -> Owner | None:
        self.now_s += seconds
        return self.owners.of("a")


def test_a_shard_that_nobody_ever_owned_has_no_owner(tmp_path: Path) -> None:
    assert _World(tmp_path).owner_after(0) is None


def test_an_owner_lives_while_its_lease_changes(tmp_path: Path) -> None:
    world = _World(tmp_path)
    world.take(1)
    for counter in range(3):
        world.renew(1, counter)
        assert world.owner_after(9) == Owner(endpoint="http://a:1", epoch=1, is_live=True)
    assert world.owner_after(9) == Owner(endpoint="http://a:1", epoch=1, is_live=True)
    # Asked twice in an hour is enough to see that nobody is there.
    assert world.owner_after(3_600) == Owner(endpoint="http://a:1", epoch=1, is_live=False)
    world.take(2)
    world.renew(2, 1, "http://b:2")
    assert world.owner_after(2) == Owner(endpoint="http://b:2", epoch=2, is_live=True)


def test_who_asks_again_at_once_gets_the_same_answer(tmp_path: Path) -> None:
    world = _World(tmp_path)
    world.take(1)
    world.renew(1, 1)
    first = world.owner_after(0)
    world.renew(1, 2, "http://b:2")
    assert world.owner_after(0.5) is first
    assert world.owner_after(1) != first


def test_no_endpoint_is_told_that_is_more_than_a_host_and_a_port(tmp_path: Path) -> None:
    world = _World(tmp_path)
    world.take(1)
    for counter, endpoint in enumerate(
        ("file:///etc/passwd", "http://a:1/steal", "http://u:p@a:1", "http://a:1\r\nx: y", "")
    ):
        world.renew(1, counter, endpoint)
        owner = world.owner_after(2)
        assert owner is not None
        assert owner.endpoint is None
