"""A disk in memory that crashes and fails where a test says, and keeps only what it promised.

Every operation that changes something is a step. At `crash_step` the process dies (SimulatedCrash,
half a write may have reached the page cache); at a step in `errors` the operation fails with that
errno. `restart` then decides, by seed, what the disk kept:

- Crash.PROCESS: the process was killed, the machine went on: everything written is there.
- Crash.POWER: only synced bytes and names are sure. Of the rest any subset of 512-byte sectors, a
  torn prefix, nothing or everything survives, and each unsynced name change does or does not.

A failed sync is as bad as on Linux: some bytes reached the disk, the others never will, and a later
sync succeeds without them.
"""

from __future__ import annotations

import enum
import errno
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from streamhouse.storage_service.log.filesystem import Buffer, WritableFile, rename_in_order

_SECTOR_BYTES: Final = 512


class SimulatedCrash(BaseException):
    """The process died. Not an Exception: no handler of the engine may survive it."""


class Crash(enum.Enum):
    """What stopped."""

    PROCESS = "process"
    POWER = "power"


@dataclass
class _Write:
    position: int
    data: bytes


@dataclass
class _Truncate:
    size_bytes: int


@dataclass
class _Inode:
    path: Path
    live: bytearray = field(default_factory=bytearray)
    synced: bytearray = field(default_factory=bytearray)
    pending: list[_Write | _Truncate] = field(default_factory=list)


@dataclass
class _NameChange:
    """One change of a directory: these names go, these come."""

    removed: tuple[str, ...]
    added: dict[str, _Inode]


@dataclass
class _Directory:
    live: dict[str, _Inode] = field(default_factory=dict)
    synced: dict[str, _Inode] = field(default_factory=dict)
    pending: list[_NameChange] = field(default_factory=list)


class CrashFilesystem:
    """`Filesystem` with faults; see the module."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._directories: dict[Path, _Directory] = {}
        self._dead = False
        self.steps = 0
        self.crash_step: int | None = None
        self.errors: dict[int, int] = {}
        # What each step was, for messages and for choosing steps.
        self.history: list[tuple[str, str]] = []

    # ------------------------------------------------------------------ faults

    def restart(self, crash: Crash) -> None:
        """Begin a new life with what the disk kept; no faults are planned in it."""
        for directory in self._directories.values():
            if crash is Crash.POWER:
                self._lose_names(directory)
            directory.synced = dict(directory.live)
            directory.pending.clear()
        for inode in self._inodes():
            if crash is Crash.POWER:
                self._lose_bytes(inode)
            inode.synced = bytearray(inode.live)
            inode.pending.clear()
        self._dead = False
        self.steps = 0
        self.crash_step = None
        self.errors = {}
        self.history = []

    def damage(self, path: Path, position: int, mask: int = 0x01) -> None:
        """Flip bits of one stored byte."""
        for contents in (self._inode(path).live, self._inode(path).synced):
            contents[position] ^= mask

    def cut(self, path: Path, size_bytes: int) -> None:
        """Cut a stored file behind the engine's back."""
        for contents in (self._inode(path).live, self._inode(path).synced):
            del contents[size_bytes:]

    def files(self) -> dict[Path, bytes]:
        """Return what all files have, as the process sees them."""
        return {
            directory / name: bytes(inode.live)
            for directory, entries in self._directories.items()
            for name, inode in entries.live.items()
        }

    def _inodes(self) -> list[_Inode]:
        inodes = {}
        for directory in self._directories.values():
            for inode in (*directory.live.values(), *directory.synced.values()):
                inodes[id(inode)] = inode
        return list(inodes.values())

    def _lose_names(self, directory: _Directory) -> None:
        names = dict(directory.synced)
        kept_share = self._random.choice((0.0, 0.5, 1.0))
        for change in directory.pending:
            if self._random.random() < kept_share:
                for name in change.removed:
                    names.pop(name, None)
                names.update(change.added)
        directory.live = names

    def _lose_bytes(self, inode: _Inode) -> None:
        contents = bytearray(inode.synced)
        kept_share = self._random.choice((0.0, 0.5, 0.9, 1.0))
        for change in inode.pending:
            self._keep_some(contents, change, kept_share)
        inode.live = contents

    def _keep_some(
        self, contents: bytearray, change: _Write | _Truncate, kept_share: float
    ) -> None:
        if isinstance(change, _Truncate):
            if self._random.random() < kept_share:
                del contents[change.size_bytes :]
            return
        position, data = change.position, change.data
        if self._random.random() < 0.3:
            data = data[: self._random.randint(0, len(data))]
        while data:
            sector_end = (position // _SECTOR_BYTES + 1) * _SECTOR_BYTES
            piece, data = data[: sector_end - position], data[sector_end - position :]
            if self._random.random() < kept_share:
                _apply(contents, _Write(position, piece))
            position += len(piece)

    def _step(self, operation: str, path: Path) -> OSError | None:
        """Count a step; crash if it is the one, or return the error it has to fail with."""
        if self._dead:
            raise SimulatedCrash
        step = self.steps
        self.steps += 1
        self.history.append((operation, path.name))
        if step == self.crash_step:
            self._dead = True
        code = self.errors.get(step)
        return None if code is None else OSError(code, os.strerror(code), str(path))

    def _before(self, operation: str, path: Path) -> None:
        error = self._step(operation, path)
        if self._dead:
            raise SimulatedCrash
        if error is not None:
            raise error

    # -------------------------------------------------------------- operations

    def _directory(self, path: Path) -> _Directory:
        try:
            return self._directories[path.parent]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "no such directory", str(path)) from None

    def _inode(self, path: Path) -> _Inode:
        try:
            return self._directory(path).live[path.name]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path)) from None

    def make_directory(self, directory: Path) -> None:
        """See `Filesystem`."""
        if directory not in self._directories:
            self._before("make_directory", directory)
            self._directories[directory] = _Directory()

    def list_names(self, directory: Path) -> list[str]:
        """See `Filesystem`."""
        return sorted(self._directories.get(directory, _Directory()).live)

    def has_directory(self, directory: Path) -> bool:
        """See `Filesystem`."""
        return directory in self._directories

    def size_bytes(self, path: Path) -> int:
        """See `Filesystem`."""
        return len(self._inode(path).live)

    def create(self, path: Path) -> WritableFile:
        """See `Filesystem`."""
        self._before("create", path)
        directory = self._directory(path)
        inode = _Inode(path)
        directory.live[path.name] = inode
        directory.pending.append(_NameChange((), {path.name: inode}))
        return _CrashFile(self, inode)

    def open(self, path: Path) -> WritableFile:
        """See `Filesystem`."""
        return _CrashFile(self, self._inode(path))

    def read(self, path: Path, *, bytes_max: int, position: int = 0) -> bytes:
        """See `Filesystem`."""
        return bytes(self._inode(path).live[position : position + bytes_max])

    def map(self, path: Path, size_bytes: int) -> memoryview:
        """See `Filesystem`."""
        del size_bytes
        return memoryview(bytes(self._inode(path).live))

    def rename(self, source: Path, target: Path) -> None:
        """See `Filesystem`."""
        self._before("rename", target)
        directory = self._directory(source)
        inode = directory.live.pop(source.name)
        directory.live[target.name] = inode
        inode.path = target
        directory.pending.append(_NameChange((source.name,), {target.name: inode}))

    def rename_in_order(self, renames: Sequence[tuple[Path, Path]]) -> None:
        """See `Filesystem`."""
        rename_in_order(self, renames)

    def remove(self, path: Path) -> None:
        """See `Filesystem`."""
        self._before("remove", path)
        self._inode(path)
        directory = self._directory(path)
        del directory.live[path.name]
        directory.pending.append(_NameChange((path.name,), {}))

    def move_directory(self, source: Path, target: Path) -> None:
        """See `Filesystem`; a power cut does not undo it here."""
        self._before("move_directory", target)
        for path in [path for path in self._directories if path.is_relative_to(source)]:
            self._directories[target / path.relative_to(source)] = self._directories.pop(path)

    def remove_tree(self, directory: Path) -> None:
        """See `Filesystem`; a power cut does not undo it here."""
        self._before("remove_tree", directory)
        for path in [path for path in self._directories if path.is_relative_to(directory)]:
            del self._directories[path]

    def forget(self, directory: Path) -> None:
        """See `Filesystem`: every view is a copy."""

    def sync_directory(self, directory: Path) -> None:
        """See `Filesystem`."""
        self._before("sync_directory", directory)
        entries = self._directories[directory]
        entries.synced = dict(entries.live)
        entries.pending.clear()

    def write(self, inode: _Inode, buffers: Sequence[Buffer], *, position: int) -> None:
        """Write to an open file; a crash or an error leaves some first part of it."""
        error = self._step("write", inode.path)
        data = b"".join(buffers)
        assert position <= len(inode.live), "a hole in the file"
        if self._dead or error is not None:
            data = data[: self._random.randint(0, len(data))]
        if data:
            inode.pending.append(_Write(position, data))
            _apply(inode.live, inode.pending[-1])
        if self._dead:
            raise SimulatedCrash
        if error is not None:
            raise error

    def sync(self, inode: _Inode) -> None:
        """Sync an open file."""
        error = self._step("sync", inode.path)
        if self._dead:
            raise SimulatedCrash
        for change in inode.pending:
            if error is None:
                _apply(inode.synced, change)
            else:
                self._keep_some(inode.synced, change, 0.5)
        inode.pending.clear()
        if error is not None:
            raise error

    def truncate(self, inode: _Inode, size_bytes: int) -> None:
        """Cut an open file."""
        self._before("truncate", inode.path)
        inode.pending.append(_Truncate(size_bytes))
        _apply(inode.live, inode.pending[-1])


class _CrashFile:
    """`WritableFile` of a CrashFilesystem."""

    def __init__(self, filesystem: CrashFilesystem, inode: _Inode) -> None:
        self._filesystem = filesystem
        self._inode = inode

    def write(self, buffers: Sequence[Buffer], *, position: int) -> None:
        self._filesystem.write(self._inode, buffers, position=position)

    def sync(self) -> None:
        self._filesystem.sync(self._inode)

    def truncate(self, size_bytes: int) -> None:
        self._filesystem.truncate(self._inode, size_bytes)

    def close(self) -> None:
        pass


def _apply(contents: bytearray, change: _Write | _Truncate) -> None:
    if isinstance(change, _Truncate):
        del contents[change.size_bytes :]
        return
    missing = change.position - len(contents)
    if missing > 0:
        contents.extend(bytes(missing))
    contents[change.position : change.position + len(change.data)] = change.data
