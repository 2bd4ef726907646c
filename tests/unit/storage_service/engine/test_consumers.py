"""Where readers stand: kept over a restart, forgotten after a time, bounded, one a token's."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamhouse.core.errors import (
    ConsumerLimitError,
    InvalidRequestError,
    StorageFailedError,
    UnavailableError,
)
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.engine.consumers import SAVE_MS, Consumers
from streamhouse.storage_service.server.status.metrics import ServiceMetrics
from tests.support.state_files import state_file

TTL_MS = 1_000_000


class World:
    """One table's consumers, and a clock that a test moves."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "consumers.json"
        self.executor = ThreadPoolExecutor(1)
        self.now_us = 1_000_000_000_000

    def open(self, **bounds: int) -> Consumers:
        """Open them as a service does that has just started."""
        return Consumers(
            state_file(self.file, "consumers"),
            table="db.t",
            runtime=Runtime(
                executor=self.executor, observer=ServiceMetrics(), clock_us=lambda: self.now_us
            ),
            **bounds,
        )


async def _report(consumers: Consumers, name: str, offset: int, *, owner: str = "me") -> None:
    await consumers.report(
        name, owner=owner, offsets={0: offset, 1: 7}, reads_lake=False, ttl_ms=TTL_MS
    )


def _stand(consumers: Consumers, *, ttl_ms: int = TTL_MS) -> dict[str, int]:
    return {one.name: one.offsets[0] for one in consumers.current(ttl_ms)}


async def test_a_new_consumer_is_there_after_a_crash(tmp_path: Path) -> None:
    world = World(tmp_path)
    await _report(world.open(), "billing", 5)

    [found] = world.open().current(TTL_MS)

    assert (found.owner, found.name, found.offsets) == ("me", "billing", {0: 5, 1: 7})
    assert found.reported_us == world.now_us


async def test_reports_are_saved_now_and_then_and_all_of_them_at_the_end(tmp_path: Path) -> None:
    world = World(tmp_path)
    consumers = world.open()
    await _report(consumers, "billing", 5)
    await _report(consumers, "billing", 6)
    assert (_stand(consumers), _stand(world.open())) == ({"billing": 6}, {"billing": 5})

    world.now_us += SAVE_MS * 1_000
    await _report(consumers, "billing", 7)
    assert _stand(world.open()) == {"billing": 7}

    await _report(consumers, "billing", 8)
    await consumers.save()
    assert _stand(world.open()) == {"billing": 7}
    await consumers.save(is_last=True)
    assert _stand(world.open()) == {"billing": 8}


async def test_one_that_says_nothing_for_long_is_forgotten(tmp_path: Path) -> None:
    world = World(tmp_path)
    consumers = world.open()
    await _report(consumers, "gone", 5)
    world.now_us += 600_000_000
    await _report(consumers, "there", 6)
    world.now_us += 400_000_000

    assert _stand(consumers) == {"there": 6}
    assert _stand(consumers, ttl_ms=2 * TTL_MS) == {"gone": 5, "there": 6}
    await _report(consumers, "there", 9)
    assert _stand(consumers, ttl_ms=2 * TTL_MS) == {"there": 9}


async def test_their_number_is_bounded_and_one_token_leaves_room_for_others(
    tmp_path: Path,
) -> None:
    consumers = World(tmp_path).open(consumers_max=3, owner_consumers_max=2)
    await _report(consumers, "a", 1)
    await _report(consumers, "b", 1)
    with pytest.raises(ConsumerLimitError, match="limit of 2 consumers of this token"):
        await _report(consumers, "c", 1)
    await _report(consumers, "b", 2)
    await _report(consumers, "a", 3, owner="you")
    with pytest.raises(ConsumerLimitError, match="limit of 3 consumers of all tokens"):
        await _report(consumers, "d", 1, owner="they")

    assert [(one.owner, one.offsets[0]) for one in consumers.current(TTL_MS)] == [
        ("me", 1),
        ("me", 2),
        ("you", 3),
    ]


async def test_a_consumer_is_forgotten_by_its_token_or_by_who_may(tmp_path: Path) -> None:
    world = World(tmp_path)
    consumers = world.open()
    await _report(consumers, "a", 1)

    await consumers.forget("a", owner="you")
    assert _stand(consumers) == {"a": 1}
    await consumers.forget("a", owner="you", of_others=True)

    assert _stand(consumers) == _stand(world.open()) == {}


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 201, "é", "a\n"])
async def test_a_consumer_needs_a_plain_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="a consumer is named by 1 to 200 letters"):
        await _report(World(tmp_path).open(), name, 1)


async def test_nothing_is_saved_after_the_end(tmp_path: Path) -> None:
    world = World(tmp_path)
    consumers = world.open()
    await _report(consumers, "a", 1)
    await consumers.end(UnavailableError("it is being moved"))

    with pytest.raises(UnavailableError, match="it is being moved"):
        await _report(consumers, "a", 2)
    with pytest.raises(UnavailableError, match="it is being moved"):
        await consumers.forget("a", owner="me")
    await consumers.save(is_last=True)

    assert _stand(world.open()) == {"a": 1}


async def test_a_damaged_file_costs_the_positions_and_no_table(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.file.write_text('{"consumers": []}')
    consumers = world.open()
    assert _stand(consumers) == {}

    await _report(consumers, "a", 1)
    assert _stand(world.open()) == {"a": 1}
    state_file(world.file, "consumers").save({"consumers": [{"name": "a"}]})
    assert _stand(world.open()) == {}


async def test_what_cannot_be_saved_is_said(tmp_path: Path) -> None:
    world = World(tmp_path)
    consumers = world.open()
    await _report(consumers, "b", 1)
    world.file.with_name("consumers.json.tmp").mkdir()
    with pytest.raises(StorageFailedError):
        await _report(consumers, "a", 1)

    world.file.with_name("consumers.json.tmp").rmdir()
    await _report(consumers, "a", 2)
    assert _stand(world.open()) == {"a": 2, "b": 1}


async def test_a_part_of_the_buckets_leaves_the_others_where_they_were(tmp_path: Path) -> None:
    world = World(tmp_path)
    consumers = world.open()
    for offsets in ({0: 5}, {1: 7}, {0: 3}):
        await consumers.report(
            "group",
            owner="me",
            offsets=offsets,
            reads_lake=True,
            ttl_ms=TTL_MS,
            is_durable=True,
            is_part=True,
        )
    for each in (consumers, world.open()):
        found = each.find("group", owner="me", ttl_ms=TTL_MS)
        assert found is not None
        assert found.offsets == {0: 3, 1: 7}
    assert consumers.find("group", owner="you", ttl_ms=TTL_MS) is None

    world.now_us += TTL_MS * 1_000
    assert consumers.find("group", owner="me", ttl_ms=TTL_MS) is None
    await consumers.report(
        "group", owner="me", offsets={2: 1}, reads_lake=True, ttl_ms=TTL_MS, is_part=True
    )
    # What it said too long ago is forgotten, and no part of it comes back.
    assert consumers.current(TTL_MS)[0].offsets == {2: 1}


async def test_reports_that_wait_for_the_disk_share_the_next_save(tmp_path: Path) -> None:
    world = World(tmp_path)
    consumers = world.open()
    saves = 0
    save = consumers._file.save

    def counted(content: Mapping[str, Any]) -> None:
        nonlocal saves
        saves += 1
        save(content)

    consumers._file = SimpleNamespace(save=counted)  # type: ignore[assignment]
    await asyncio.gather(*(_report(consumers, f"c{i}", i) for i in range(20)))

    assert saves == 2
    assert len(world.open().current(TTL_MS)) == 20


async def test_a_durable_report_is_on_disk_though_another_one_was_being_saved(
    tmp_path: Path,
) -> None:
    consumers = World(tmp_path).open()

    async def commit(offset: int) -> None:
        await consumers.report(
            "group",
            owner="me",
            offsets={0: offset},
            reads_lake=True,
            ttl_ms=TTL_MS,
            is_durable=True,
        )

    await commit(5)
    # It goes back to what the file has, while the file gets something else.
    await asyncio.gather(commit(9), commit(5))

    assert _stand(World(tmp_path).open()) == {"group": 5}


async def test_a_durable_report_after_a_save_that_failed_is_saved(tmp_path: Path) -> None:
    consumers = World(tmp_path).open()
    save = consumers._file.save

    def broken(content: Mapping[str, Any]) -> None:
        save(content)
        raise StorageFailedError("the directory is not synced")

    async def commit(offset: int) -> None:
        await consumers.report(
            "group",
            owner="me",
            offsets={0: offset},
            reads_lake=True,
            ttl_ms=TTL_MS,
            is_durable=True,
        )

    await commit(5)
    consumers._file = SimpleNamespace(save=broken)  # type: ignore[assignment]
    with pytest.raises(StorageFailedError):
        await commit(9)
    consumers._file = SimpleNamespace(save=save)  # type: ignore[assignment]
    await commit(5)

    assert _stand(World(tmp_path).open()) == {"group": 5}
