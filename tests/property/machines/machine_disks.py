"""What happens to a machine that dies: to its store, and to its disk.

The store takes some changes more and then the process ends. A disk is full when a restore writes to
it, is an older copy of itself, or has other bits than were written.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from streamhouse.storage_service.log.filesystem import Buffer
from streamhouse.storage_service.ownership.journal.restore._local_copy import local_files
from streamhouse.storage_service.ownership.journal.restore.journal_file import JournalFile, Phase
from streamhouse.storage_service.ownership.journal.store._file_store import FileObjectStore

__all__ = [
    "DIED",
    "FULL",
    "REFUSED",
    "MortalStore",
    "check_not_half_ready",
    "copy_disk",
    "disk_full",
    "flip_bit",
    "journalled_bytes",
]

DIED: Final = 77
"""The exit code of a machine that died; one that was ended at a quiet moment has 0."""
REFUSED: Final = 78
"""That of one that found its disk damaged, and said so."""
FULL: Final = 79
"""That of one whose disk was full while its directory was made what the journal says."""


class MortalStore:
    """A store whose machine dies with the change number `lives` of it, made or not."""

    def __init__(self, inner: FileObjectStore, lives: int, rng: random.Random) -> None:
        self._inner = inner
        self._lives = lives
        self._is_made = rng.random() < 0.5

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _do(self, change: Callable[..., None], *arguments: Any) -> None:
        self._lives -= 1
        if self._lives < 0:
            if self._is_made:
                change(*arguments)
            os._exit(DIED)
        change(*arguments)

    def create(self, key: str, buffers: Sequence[Buffer]) -> None:
        self._do(self._inner.create, key, buffers)

    def replace(self, key: str, data: Buffer) -> None:
        self._do(self._inner.replace, key, data)

    def delete(self, keys: Sequence[str]) -> None:
        self._do(self._inner.delete, keys)


@contextmanager
def disk_full(directory: Path, after: int) -> Iterator[Callable[[], int]]:
    """Let the disk of `directory` take `after` changes, then none; yields how many it refused.

    Of a write that is refused half may be there. The store is on another disk.
    """
    left, refused, lock = after, 0, threading.Lock()

    def check(path: str | Path) -> None:
        nonlocal left, refused
        if Path(path).is_relative_to(directory):
            with lock:
                left -= 1
                refused += left < 0
            if left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(file: int, buffers: Sequence[Buffer], position: int) -> int:
        try:
            check(Path(f"/proc/self/fd/{file}").readlink())
        except OSError:
            data = b"".join(buffers)
            former["pwritev"](file, [data[: len(data) // 2]], position)
            raise
        return int(former["pwritev"](file, buffers, position))

    def make_file(path: str | Path, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            check(path)
        return int(former["open"](path, flags, *rest, **named))

    def make_name(name: str) -> Callable[..., None]:
        def made(*paths: Any, **named: Any) -> None:
            check(paths[-1] if name != "mkdir" else paths[0])
            former[name](*paths, **named)

        return made

    names = ("mkdir", "rename", "replace")
    former: dict[str, Any] = {name: getattr(os, name) for name in ("pwritev", "open", *names)}
    failing = {"pwritev": write, "open": make_file, **{name: make_name(name) for name in names}}
    for name, call in failing.items():
        setattr(os, name, call)
    try:
        yield lambda: refused
    finally:
        for name, call in former.items():
            setattr(os, name, call)


def journalled_bytes(directory: Path) -> dict[str, bytes]:
    """Return the files of the journal's kind that a directory has."""
    return {path: (directory / path).read_bytes() for path in local_files(directory)}


def check_not_half_ready(directory: Path, before: dict[str, bytes]) -> None:
    """A directory whose restore failed is what it was, or says that it must not be served."""
    known = JournalFile.load(directory)
    if known is None or known.phase == Phase.READY:
        assert journalled_bytes(directory) == before


def copy_disk(source: Path, target: Path) -> bool:
    """Make `target` a copy; False if it changed meanwhile: then there is none."""
    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(source, target)
    except (shutil.Error, FileNotFoundError):
        # RocksDB tidies up on threads of its own.
        shutil.rmtree(target, ignore_errors=True)
        return False
    return True


def flip_bit(directory: Path, rng: random.Random) -> str:
    """Change one bit of one file; return which file."""
    files = sorted(
        path
        for path in directory.rglob("*")
        if path.is_file() and path.stat().st_size and path.name not in ("LOCK", "LOG")
    )
    if not files:
        return ""
    path = rng.choice(files)
    data = bytearray(path.read_bytes())
    bit = rng.randrange(len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return path.relative_to(directory).as_posix()
