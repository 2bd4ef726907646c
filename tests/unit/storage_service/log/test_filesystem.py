"""The contract of `Filesystem`, kept by the local disk and by the one that crashes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from streamhouse.storage_service.log.filesystem import (
    Filesystem,
    LocalFilesystem,
    replace_durably,
)
from tests.support.crash_filesystem import Crash, CrashFilesystem


@pytest.fixture(params=["local", "crash"])
def filesystem(request: pytest.FixtureRequest) -> Filesystem:
    return LocalFilesystem() if request.param == "local" else CrashFilesystem(0)


@pytest.fixture
def directory(filesystem: Filesystem, tmp_path: Path) -> Path:
    created = tmp_path / "a" / "b"
    filesystem.make_directory(created)
    return created


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _put(filesystem: Filesystem, path: Path, contents: bytes) -> None:
    file = filesystem.create(path)
    file.write([contents], position=0)
    file.close()


def test_make_directory_again_changes_nothing(filesystem: Filesystem, directory: Path) -> None:
    _put(filesystem, directory / "x", b"1")

    filesystem.make_directory(directory)

    assert filesystem.list_names(directory) == ["x"]


def test_list_names_is_sorted_and_empty_for_nothing(
    filesystem: Filesystem, directory: Path
) -> None:
    for name in ("b", "a", "c"):
        _put(filesystem, directory / name, b"")

    assert filesystem.list_names(directory) == ["a", "b", "c"]
    assert filesystem.list_names(directory / "absent") == []


def test_write_takes_many_buffers_at_any_position(filesystem: Filesystem, directory: Path) -> None:
    buffers = [bytes([n % 256]) * (n % 700) for n in range(3000)]
    file = filesystem.create(directory / "x")
    file.write([b"head"], position=0)

    file.write(buffers, position=4)
    file.write([memoryview(b"HE")], position=0)
    file.sync()

    expected = b"HEad" + b"".join(buffers)
    assert filesystem.read(directory / "x", bytes_max=1 << 30) == expected
    assert filesystem.size_bytes(directory / "x") == len(expected)
    file.close()
    file.close()


def test_open_keeps_contents_and_create_empties(filesystem: Filesystem, directory: Path) -> None:
    _put(filesystem, directory / "x", b"12345")

    file = filesystem.open(directory / "x")
    file.truncate(3)
    file.close()

    assert filesystem.read(directory / "x", bytes_max=10) == b"123"
    filesystem.create(directory / "x").close()
    assert filesystem.size_bytes(directory / "x") == 0


def test_absent_files_are_said_to_be_absent(filesystem: Filesystem, directory: Path) -> None:
    with pytest.raises(FileNotFoundError):
        filesystem.open(directory / "x")
    with pytest.raises(FileNotFoundError):
        filesystem.read(directory / "x", bytes_max=1)
    with pytest.raises(FileNotFoundError):
        filesystem.map(directory / "x", 0)
    with pytest.raises(FileNotFoundError):
        filesystem.remove(directory / "x")


def test_a_map_of_a_file_that_was_cut_is_shorter(tmp_path: Path) -> None:
    """A page behind the file's end would end the process at its touch."""
    path, filesystem = tmp_path / "x", LocalFilesystem()
    _put(filesystem, path, bytes(10_000))
    whole = filesystem.map(path, 10_000)
    os.truncate(path, 100)

    assert len(whole) == 10_000
    assert len(filesystem.map(path, 10_000)) == 100
    assert len(filesystem.map(path, 100)) >= 100
    os.truncate(path, 0)
    assert len(filesystem.map(path, 1)) == 0


def test_map_sees_growth_and_survives_removal(filesystem: Filesystem, directory: Path) -> None:
    path = directory / "x"
    _put(filesystem, path, b"first")
    view = filesystem.map(path, 5)
    file = filesystem.open(path)
    file.write([b" second"], position=5)
    file.close()

    grown = filesystem.map(path, 12)
    filesystem.remove(path)

    assert (view[:5], grown[:12]) == (b"first", b"first second")
    assert grown.readonly


def test_map_of_an_empty_file_is_empty(filesystem: Filesystem, directory: Path) -> None:
    _put(filesystem, directory / "x", b"")

    assert len(filesystem.map(directory / "x", 0)) == 0


def test_map_after_rename_shows_the_new_file(filesystem: Filesystem, directory: Path) -> None:
    _put(filesystem, directory / "x", b"old")
    filesystem.map(directory / "x", 3)

    replace_durably(filesystem, directory / "x", [b"ne", b"w"])

    assert filesystem.map(directory / "x", 3) == b"new"
    assert filesystem.list_names(directory) == ["x"]


def test_a_directory_is_moved_and_removed_with_all_in_it(
    filesystem: Filesystem, directory: Path
) -> None:
    filesystem.make_directory(directory / "c")
    _put(filesystem, directory / "x", b"1")
    _put(filesystem, directory / "c" / "y", b"2")
    moved = directory.with_name("moved")

    filesystem.move_directory(directory, moved)

    assert filesystem.list_names(directory) == []
    assert filesystem.read(moved / "c" / "y", bytes_max=9) == b"2"
    filesystem.remove_tree(moved)
    filesystem.remove_tree(moved)
    assert filesystem.list_names(moved) == filesystem.list_names(moved / "c") == []


def test_what_is_refused_leaves_nothing_beside(tmp_path: Path) -> None:
    filesystem = CrashFilesystem(0)
    filesystem.make_directory(tmp_path)
    replace_durably(filesystem, tmp_path / "x", [b"old"])
    filesystem.errors = {filesystem.steps + 1: errno.ENOSPC}

    with pytest.raises(OSError, match="No space left"):
        replace_durably(filesystem, tmp_path / "x", [b"new and longer"])

    assert filesystem.list_names(tmp_path) == ["x"]


def test_local_filesystem_holds_few_files_open(tmp_path: Path) -> None:
    filesystem = LocalFilesystem(mapped_files_max=3)
    open_before = _open_files()
    for n in range(20):
        _put(filesystem, tmp_path / str(n), b"%d" % n)

    assert [filesystem.map(tmp_path / str(n), 1)[:2] for n in range(20)] == [
        b"%d" % n for n in range(20)
    ]

    assert _open_files() <= open_before + 3


def test_local_write_goes_on_after_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.pwritev

    def short(descriptor: int, buffers: list[bytes], position: int) -> int:
        data = b"".join(buffers)
        return whole(descriptor, [data[: max(1, len(data) // 3)]], position)

    monkeypatch.setattr(os, "pwritev", short)
    buffers = [os.urandom(200_000), b"", os.urandom(300_000)]

    file = LocalFilesystem().create(tmp_path / "x")
    file.write(buffers, position=0)
    file.close()

    assert (tmp_path / "x").read_bytes() == b"".join(buffers)


@pytest.mark.parametrize("fault", ["crash", "error"])
@pytest.mark.parametrize("crash", list(Crash))
def test_replace_durably_leaves_the_old_or_the_new(crash: Crash, fault: str) -> None:
    for step in range(4):
        for seed in range(10):
            filesystem = CrashFilesystem(seed)
            path = Path("/d/x")
            filesystem.make_directory(path.parent)
            replace_durably(filesystem, path, [b"old"])
            filesystem.sync_directory(path.parent)
            if fault == "crash":
                filesystem.crash_step = filesystem.steps + step
            else:
                filesystem.errors = {filesystem.steps + step: errno.ENOSPC}

            with pytest.raises(BaseException):  # noqa: B017, PT011 - a crash is no Exception
                replace_durably(filesystem, path, [b"new and longer"])
            filesystem.restart(crash)

            assert filesystem.read(path, bytes_max=99) in (b"old", b"new and longer")
