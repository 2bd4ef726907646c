"""What records take of memory while they are read: room for all, in their order."""

from __future__ import annotations

import asyncio

from streamhouse.storage_service.server.http.fair_shares import WorkingMemory


class Readers:
    """Those who want room, each until it is let go."""

    def __init__(self, bytes_max: int) -> None:
        self.memory = WorkingMemory(bytes_max)
        self.inside: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, name: str, byte_count: int, share: str = "") -> None:
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._read(name, byte_count, share))
        await _turns()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self._tasks[name]
        await _turns()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.wait([self._tasks[name]])
        await _turns()

    async def _read(self, name: str, byte_count: int, share: str) -> None:
        async with self.memory.room(share, byte_count):
            self.inside.append(name)
            await self._ends[name].wait()
            self.inside.remove(name)


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_finds_no_room_waits_and_nobody_is_overtaken() -> None:
    readers = Readers(10)
    for name, byte_count in {"a": 6, "b": 5, "c": 1}.items():
        await readers.begin(name, byte_count)
    assert readers.inside == ["a"]

    await readers.end("a")
    assert readers.inside == ["b", "c"]
    for name in "bc":
        await readers.end(name)
    assert readers.memory.held == 0


async def test_callers_take_turns_and_none_overtakes_a_large_request_of_another() -> None:
    readers = Readers(10)
    requests = {"a": (6, "x"), "b": (9, "x"), "c": (9, "x"), "d": (8, "y"), "e": (1, "z")}
    for name, (byte_count, share) in requests.items():
        await readers.begin(name, byte_count, share)
    assert readers.inside == ["a"]

    for name, inside in (("a", ["b"]), ("b", ["d", "e"]), ("d", ["e", "c"])):
        await readers.end(name)
        assert readers.inside == inside
    for name in "ec":
        await readers.end(name)
    assert readers.memory.held == 0


async def test_what_wants_more_than_there_is_gets_it_alone() -> None:
    readers = Readers(10)
    for name, byte_count in {"a": 1, "large": 50, "b": 1}.items():
        await readers.begin(name, byte_count)
    assert readers.inside == ["a"]

    await readers.end("a")
    assert readers.inside == ["large"]
    await readers.end("large")
    assert readers.inside == ["b"]


async def test_who_waits_no_more_holds_nothing_and_lets_others_in() -> None:
    readers = Readers(10)
    for name, byte_count in {"a": 6, "b": 9, "c": 4}.items():
        await readers.begin(name, byte_count)

    await readers.cancel("b")
    assert readers.inside == ["a", "c"]
    await readers.cancel("a")
    await readers.end("c")
    assert readers.memory.held == 0
