"""What is recorded makes the same files elsewhere, at every place of the journal that is stored."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.errors import NotOwnerError, UnknownOutcomeError
from streamhouse.storage_service.log.filesystem import WritableFile, replace_durably
from streamhouse.storage_service.ownership.journal._journaled_filesystem import JournaledFilesystem
from streamhouse.storage_service.ownership.journal.operations import is_journalled
from tests.support.crash_filesystem import CrashFilesystem
from tests.support.late_journal import LateJournal, files_after

ROOT: Final = Path("/data")
TABLES: Final = ("tables/1", "tables/2")
STATES: Final = ("service.json", "tables/1/table.json", "tables/2/transactions/ab.open")
LOGS: Final = tuple(f"{table}/bucket-0/{base:020d}.log" for table in TABLES for base in (0, 7))
MARK_NAME: Final = "durable.mark"


class ProcessEnded(BaseException):
    """What a service does that cannot do what is stored."""


def _end(why: str) -> None:
    raise ProcessEnded(why)


class World:
    """A data directory, and what its journal has of it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.disk = CrashFilesystem(seed)
        self.journal = LateJournal(self._on_wait)
        self.filesystem = JournaledFilesystem(
            self.disk, ROOT, self.journal, log_bytes={}, on_failure=_end
        )
        for directory in (ROOT, ROOT / "tables"):
            self.disk.make_directory(directory)
        self.logs: dict[str, tuple[WritableFile, int]] = {}

    def local(self) -> dict[str, bytes]:
        """Return the files of the disk that are in the journal."""
        files = {
            path.relative_to(ROOT).as_posix(): data for path, data in self.disk.files().items()
        }
        return {name: data for name, data in files.items() if is_journalled(name)}

    def _on_wait(self, position: int) -> None:
        self.check_not_ahead()
        self.journal.store(position - self.journal.stored_position)

    def check_not_ahead(self, *, may_lack_last: bool = False) -> None:
        """Nothing but the ends of logs, and marks, is here before it is stored."""
        position = self.journal.stored_position
        stored = files_after(self.journal.operations[:position])
        before = files_after(self.journal.operations[: max(0, position - may_lack_last)])
        for name, data in self.local().items():
            if name.endswith(".log"):
                assert any(
                    name in files and data.startswith(files[name]) for files in (stored, before)
                )
            elif not name.endswith(MARK_NAME):
                assert data in (stored.get(name), before.get(name))

    def check_same(self) -> None:
        """What is recorded is what is here, but for what no sync made durable."""
        recorded, local = files_after(self.journal.operations), self.local()
        assert recorded.keys() == local.keys()
        for name, data in local.items():
            if name.endswith(".log"):
                assert data.startswith(recorded[name])
                if name in self.logs:
                    assert len(recorded[name]) == self.logs[name][1]
            elif not name.endswith(MARK_NAME):
                assert data == recorded[name]

    # -- what a service does -----------------------------------------------------------------

    def replace(self, name: str, data: bytes) -> None:
        replace_durably(self.filesystem, ROOT / name, [data[:3], data[3:]])
        self.filesystem.sync_directory((ROOT / name).parent)

    def begin_log(self, name: str) -> None:
        self.replace(name, b"header")
        self.logs[name] = (self.filesystem.open(ROOT / name), 6)

    def append(self, name: str, data: bytes, *, is_taken_back: bool) -> None:
        file, end = self.logs[name]
        try:
            file.write([data[:2], memoryview(data)[2:]], position=end)
        except OSError:
            is_taken_back = True
        if is_taken_back:
            try:
                file.truncate(end)
            finally:
                file.sync()
            return
        file.sync()
        self.logs[name] = (file, end + len(data))

    def mark(self, name: str, data: bytes) -> None:
        self.replace(name, data)
        before = self.journal.recorded_position
        with_slots = self.filesystem.open(ROOT / name)
        with_slots.write([data], position=len(data))
        with_slots.close()
        assert self.journal.recorded_position == before

    def move(self, table: str) -> None:
        self.filesystem.move_directory(ROOT / table, ROOT / f"{table}.given-up")
        self.logs = {
            name.replace(f"{table}/", f"{table}.given-up/"): log for name, log in self.logs.items()
        }

    def remove_tree(self, directory: str) -> None:
        self.filesystem.remove_tree(ROOT / directory)
        gone = [name for name in self.logs if name.startswith(directory + "/")]
        for name in gone:
            file, end = self.logs.pop(name)
            file.write([b"nobody's"], position=end)
            file.sync()

    def do(self, draw: st.DrawFn) -> None:
        table = draw(st.sampled_from(TABLES))
        data = draw(st.binary(min_size=1, max_size=9))
        local = self.local()
        match draw(st.sampled_from(("directory", "state", "log", "append", "mark", "rare"))):
            case "directory":
                for name in (table, f"{table}/bucket-0", f"{table}/transactions"):
                    self.filesystem.make_directory(ROOT / name)
            case "state":
                name = draw(st.sampled_from(STATES))
                if not self.disk.has_directory((ROOT / name).parent):
                    return
                if name in local and draw(st.booleans()):
                    self.filesystem.remove(ROOT / name)
                else:
                    self.replace(name, data)
            case "log":
                name = draw(st.sampled_from(LOGS))
                if name not in local and self.disk.has_directory((ROOT / name).parent):
                    self.begin_log(name)
            case "append" if self.logs:
                name = draw(st.sampled_from(sorted(self.logs)))
                self.append(name, data, is_taken_back=draw(st.booleans()))
            case "mark" if self.disk.has_directory(ROOT / table / "bucket-0"):
                self.mark(f"{table}/bucket-0/{MARK_NAME}", data)
            case "rare" if draw(st.booleans()) and self.disk.has_directory(ROOT / table):
                given_up = f"{table}.given-up"
                if draw(st.booleans()) and not self.disk.has_directory(ROOT / given_up):
                    self.move(table)
                else:
                    self.remove_tree(draw(st.sampled_from((table, given_up))))


@given(st.data(), st.integers(0, 1 << 30))
def test_the_journal_makes_the_same_files(data: st.DataObject, seed: int) -> None:
    world = World(seed)

    for _ in range(data.draw(st.integers(1, 25))):
        world.do(data.draw)
        world.check_same()
        world.check_not_ahead()
        world.journal.store(data.draw(st.integers(0, 3)))

    world.journal.store()
    assert files_after(world.journal.operations).keys() == world.local().keys()


@given(st.data(), st.integers(0, 1 << 30))
def test_what_the_disk_refuses_is_not_recorded(data: st.DataObject, seed: int) -> None:
    """A step that fails leaves journal and disk alike, or ends the process."""
    world = World(seed)
    try:
        for _ in range(data.draw(st.integers(1, 25))):
            if data.draw(st.booleans()):
                code = data.draw(st.sampled_from((errno.ENOSPC, errno.EIO)))
                world.disk.errors = {world.disk.steps + data.draw(st.integers(0, 5)): code}
            try:
                world.do(data.draw)
            except OSError:
                # What failed halfway may be looked at again only after the next start.
                world.check_not_ahead()
                return
            world.disk.errors = {}
            world.check_same()
    except ProcessEnded:
        # The disk refused what is in the journal: the next start makes it.
        world.check_not_ahead(may_lack_last=True)


def test_what_was_on_its_way_when_another_took_over_may_be_stored() -> None:
    world = World(0)
    world.replace("service.json", b"old one")

    def lose(position: int) -> None:
        world.journal.is_lost = position > 0

    world.journal.on_wait = lose
    with pytest.raises(UnknownOutcomeError, match=r"service\.json: another process took over"):
        world.replace("service.json", b"new one")
    with pytest.raises(NotOwnerError):
        world.replace("service.json", b"another")

    assert world.local() == {"service.json": b"old one"}


def test_a_rename_that_fails_once_it_is_stored_ends_the_process() -> None:
    world = World(0)
    world.replace("service.json", b"old one")
    # create, write, sync, rename
    world.disk.errors = {world.disk.steps + 3: errno.EIO}

    with pytest.raises(ProcessEnded, match=r"service\.json is in the journal, but the disk"):
        world.replace("service.json", b"new one")

    assert world.local() == {"service.json": b"old one"}
    assert files_after(world.journal.operations) == {"service.json": b"new one"}
