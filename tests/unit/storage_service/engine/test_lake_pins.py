"""Lake pins: durable, ending by themselves, bounded, one a holder."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from streamhouse.core.errors import (
    CorruptDataError,
    InvalidRequestError,
    OverloadedError,
    StorageFailedError,
)
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.engine.lake_pins import LakePins
from streamhouse.storage_service.server.status.metrics import ServiceMetrics
from tests.support.state_files import state_file


class World:
    """One table's pins, and a clock that a test moves."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.executor = ThreadPoolExecutor(1)
        self.now_us = 1_000_000

    def open(self, **bounds: int) -> LakePins:
        """Open the pins as a service does that has just started."""
        return LakePins(
            state_file(self.file, "lake_pins"),
            table="db.t",
            runtime=Runtime(
                executor=self.executor, observer=ServiceMetrics(), clock_us=lambda: self.now_us
            ),
            **bounds,
        )


def _held(pins: LakePins) -> dict[str, int]:
    return {pin.holder: pin.snapshot_id for pin in pins.current()}


async def test_pins_are_there_after_a_restart(tmp_path: Path) -> None:
    world = World(tmp_path / "lake_pins.json")
    pins = world.open()
    await pins.pin("b", owner="me", snapshot_id=2, ttl_ms=1)
    answer = await pins.pin("a", owner="me", snapshot_id=1 << 62, ttl_ms=5)
    assert answer.expires_timestamp_us == 1_005_000
    assert _held(world.open()) == {"a": 1 << 62, "b": 2}

    await pins.unpin("b", owner="me")
    await pins.unpin("nobody", owner="me")

    assert _held(world.open()) == _held(pins) == {"a": 1 << 62}


async def test_a_pin_ends_by_itself_and_can_be_renewed_and_moved(tmp_path: Path) -> None:
    world = World(tmp_path / "lake_pins.json")
    pins = world.open()
    await pins.pin("a", owner="me", snapshot_id=1, ttl_ms=10)
    await pins.pin("b", owner="me", snapshot_id=1, ttl_ms=10)
    world.now_us += 6_000
    await pins.pin("a", owner="me", snapshot_id=2, ttl_ms=10)
    world.now_us += 4_000

    assert _held(pins) == _held(world.open()) == {"a": 2}

    world.now_us += 6_000
    assert _held(pins) == _held(world.open()) == {}


async def test_their_number_is_bounded_and_ended_ones_do_not_count(tmp_path: Path) -> None:
    world = World(tmp_path / "lake_pins.json")
    pins = world.open(pins_max=2)
    await pins.pin("a", owner="me", snapshot_id=1, ttl_ms=10)
    await pins.pin("b", owner="me", snapshot_id=1, ttl_ms=20)
    with pytest.raises(OverloadedError, match="has its limit of 2 lake pins"):
        await pins.pin("c", owner="me", snapshot_id=1, ttl_ms=10)
    await pins.pin("b", owner="me", snapshot_id=3, ttl_ms=20)
    world.now_us += 10_000

    await pins.pin("c", owner="me", snapshot_id=4, ttl_ms=10)

    assert _held(pins) == {"b": 3, "c": 4}


async def test_a_pin_is_its_owners_and_others_may_have_one_of_that_name(tmp_path: Path) -> None:
    world = World(tmp_path / "lake_pins.json")
    pins = world.open()
    await pins.pin("a", owner="me", snapshot_id=1, ttl_ms=10)
    await pins.pin("a", owner="you", snapshot_id=2, ttl_ms=10)
    await pins.pin("a", owner="you", snapshot_id=3, ttl_ms=10)
    found = [(pin.owner, pin.snapshot_id) for pin in world.open().current()]
    assert found == [("me", 1), ("you", 3)]

    await pins.unpin("a", owner="somebody else")
    assert len(pins.current()) == 2
    await pins.unpin("a", owner="you", of_others=True)
    assert [pin.owner for pin in pins.current()] == ["me"]
    await pins.unpin("a", owner="you", of_others=True)
    assert pins.current() == []


async def test_one_owner_leaves_room_for_others(tmp_path: Path) -> None:
    world = World(tmp_path / "lake_pins.json")
    pins = world.open(owner_pins_max=1)
    await pins.pin("a", owner="me", snapshot_id=1, ttl_ms=10)
    with pytest.raises(OverloadedError, match="1 lake pins of this token"):
        await pins.pin("b", owner="me", snapshot_id=1, ttl_ms=10)
    await pins.pin("b", owner="you", snapshot_id=1, ttl_ms=10)


async def test_pins_of_before_they_had_owners_go_on_until_they_end(tmp_path: Path) -> None:
    world = World(tmp_path / "lake_pins.json")
    old = {"holder": "a", "snapshot_id": "1", "expires_timestamp_us": 2_000_000}
    state_file(world.file, "lake_pins").save({"pins": [old]})
    pins = world.open()
    await pins.pin("a", owner="me", snapshot_id=2, ttl_ms=10_000)
    await pins.unpin("a", owner="me")
    assert _held(pins) == {"a": 1}
    world.now_us = 2_000_000
    assert _held(pins) == {}


@pytest.mark.parametrize("holder", ["", "a/b", "a b", "x" * 201, "é", "a\n"])
async def test_a_holder_needs_a_plain_name(tmp_path: Path, holder: str) -> None:
    world = World(tmp_path / "lake_pins.json")
    with pytest.raises(InvalidRequestError, match="the holder of a lake pin is named by"):
        await world.open().pin(holder, owner="me", snapshot_id=1, ttl_ms=1)


@pytest.mark.parametrize("ttl_ms", [0, -1, 7 * 86_400_000 + 1])
async def test_a_pin_does_not_last_for_ever(tmp_path: Path, ttl_ms: int) -> None:
    world = World(tmp_path / "lake_pins.json")
    with pytest.raises(InvalidRequestError, match="a lake pin lasts from 1 ms to 604800000 ms"):
        await world.open().pin("a", owner="me", snapshot_id=1, ttl_ms=ttl_ms)


async def test_what_cannot_be_saved_is_not_promised(tmp_path: Path) -> None:
    world = World(tmp_path / "lake_pins.json")
    pins = world.open()
    await pins.pin("a", owner="me", snapshot_id=1, ttl_ms=10)
    world.file.with_name("lake_pins.json.tmp").mkdir()
    with pytest.raises(StorageFailedError):
        await pins.pin("b", owner="me", snapshot_id=2, ttl_ms=10)
    with pytest.raises(StorageFailedError):
        await pins.unpin("a", owner="me")
    assert _held(pins) == {"a": 1}


async def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    world = World(tmp_path / "lake_pins.json")
    world.file.write_text('{"pins": []}')
    with pytest.raises(CorruptDataError, match=r"lake_pins\.json is damaged"):
        world.open()
    state_file(world.file, "lake_pins").save({"pins": [{"holder": "a"}]})
    with pytest.raises(CorruptDataError, match=r"lake_pins\.json holds no lake pins"):
        world.open()
