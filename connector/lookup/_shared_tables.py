"""A whole table that the tasks of one machine read once, as a file of the executor's own.

Each task runs in a process of its own, and a table with its index takes longer to read and to make
than to copy. Invariants:

- A file is named for what is looked up and for the cut that it was read at. Each task asks the
  service for the cut before it looks for the file, so it never sees less than it would have read.
- Where there is no file of the cut, a task takes one of an earlier cut and brings it up to its own
  in memory. Only what takes long is written: a table that was read, or brought a long way.
- The directory is Spark's own for this executor, which goes with it. At most four files are kept,
  and none is used that was read more than a minute ago, however often it was brought further since.
- A file is whole once it has its name. Who makes it holds a lock that goes with the process; others
  wait, and make it themselves if there is none afterwards.
- A file that has another checksum or name than it was written with is not used. Where anything of
  this fails the task reads the table by itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import logging
import mmap
import os
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.connector.lookup._key_rows import KeyRows, KeyRowsParts

__all__ = ["Cut", "SharedTables", "shared_by_executor"]

_log = logging.getLogger(__name__)

_FILES_MAX: Final = 4
_AGE_MAX_S: Final = 60.0
_BROUGHT_SHARE: Final = 8
"""A table is brought further by at most so many changes of its rows: then it is read as quickly."""
_SLOW_SHARE: Final = 32
"""After one change of so many rows it is worth a file."""
_BEING_MADE: Final = ".part"
_ALIGNMENT: Final = 64
_CHECKSUM_BYTES: Final = 4
_LENGTH_BYTES: Final = 8
_HEAD_START: Final = 2 * _CHECKSUM_BYTES + _LENGTH_BYTES
_HEAD_BYTES_MAX: Final = 1 << 22

_Bytes = npt.NDArray[np.uint8]


def shared_by_executor() -> SharedTables | None:
    """Return the tables of the executor that this process works for, if it works for one."""
    # Spark sets it for each process that runs tasks.
    directory = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0]
    return SharedTables(Path(directory, "streamhouse-lookup")) if directory else None


class Cut(Protocol):
    """A table at one instant, which others may have read at another one."""

    @property
    def name(self) -> str:
        """What no other cut has, nor anything else that is shared."""
        ...

    @property
    def form(self) -> str | None:
        """What cuts have in common of which one is brought up to another; None: none are."""
        ...

    @property
    def place(self) -> Any:
        """Where it is among these, as JSON."""
        ...

    def since(self, place: Any) -> int | None:
        """Return how many changes came after that one; None if it is nothing to begin with."""
        ...

    def made(self) -> KeyRows:
        """Return the table."""
        ...

    def brought(self, table: KeyRows, place: Any) -> KeyRows | None:
        """Return the table of that cut with the changes since, if that can be."""
        ...


class _Head(NamedTuple):
    """What a file says of itself, and when its table was read."""

    said: dict[str, Any]
    read_ns: int


class _Earlier(NamedTuple):
    """A file that a cut may begin with, and how many changes came since."""

    path: Path
    head: _Head
    changes: int

    @property
    def is_near(self) -> bool:
        return self.changes * _SLOW_SHARE <= int(self.head.said["rows"])


class SharedTables:
    """Tables of a directory that this user alone can write to."""

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._directory: Final = directory
        self._clock: Final = clock

    def made_once(self, cut: Cut) -> KeyRows:
        """Return the table at a cut, or a later one; it is made if nothing there leads to it."""
        path = self._path_of(cut)
        lock = _part_of(path if cut.form is None else self._directory / _digest(cut.form))
        part = None
        tried: set[Path] = set()
        with _not_shared(path):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owned(self._directory)
            if (known := self._read(path)) is not None:
                return known
            if (brought := self._brought(cut, tried, is_near=True)) is not None:
                return brought[0]
            part = _locked(lock, is_waiting=True)
        try:
            return self._made(cut, path, part, lock, tried)
        finally:
            if part is not None:
                with _not_shared(path):
                    if _is_at(part, lock):
                        lock.unlink()
                os.close(part)

    def _made(
        self, cut: Cut, path: Path, part: int | None, lock: Path, tried: set[Path]
    ) -> KeyRows:
        """Return the table once nobody else makes it; write it to the file that is locked."""
        brought = None
        with _not_shared(path):
            # Whoever was waited for may have made it, or one that is near.
            if (known := self._read(path)) is not None:
                return known
            brought = self._brought(cut, tried)
        made, earlier = (cut.made(), None) if brought is None else brought
        if earlier is not None and earlier.is_near:
            return made
        if part is not None:
            with _not_shared(path):
                _write(made.parts(), part, name=path.name, place=cut.place)
                if earlier is not None:
                    os.utime(part, ns=(earlier.head.read_ns, earlier.head.read_ns))
                lock.rename(path)
                self._sweep(path)
        return made

    def _path_of(self, cut: Cut) -> Path:
        name = _digest(cut.name)
        return self._directory / (name if cut.form is None else f"{_digest(cut.form)}-{name}")

    def _nearest(self, cut: Cut) -> _Earlier | None:
        """Return the file of an earlier cut that lacks the fewest changes."""
        if cut.form is None:
            return None
        found: list[_Earlier] = []
        for path in self._directory.glob(f"{_digest(cut.form)}-*"):
            with _not_shared(path):
                head = self._head_of(path)
                if head is None:
                    continue
                changes = cut.since(head.said["place"])
                if changes is not None and changes * _BROUGHT_SHARE <= head.said["rows"]:
                    found.append(_Earlier(path, head, changes))
        return min(found, key=lambda each: each.changes, default=None)

    def _brought(
        self, cut: Cut, tried: set[Path], *, is_near: bool = False
    ) -> tuple[KeyRows, _Earlier] | None:
        """Return the table as it was once with the changes since, and that one, if it is there."""
        earlier = self._nearest(cut)
        if earlier is None or earlier.path in tried or (is_near and not earlier.is_near):
            return None
        tried.add(earlier.path)
        table = None
        with _not_shared(earlier.path):
            known = self._read(earlier.path)
            table = None if known is None else cut.brought(known, earlier.head.said["place"])
        return None if table is None else (table, earlier)

    def _head_of(self, path: Path) -> _Head | None:
        with self._opened(path) as file:
            return None if file is None else _head_in(file)

    def _read(self, path: Path) -> KeyRows | None:
        with self._opened(path) as file:
            if file is None:
                return None
            content = _memory(os.fstat(file.fileno()).st_size)
            read = 0
            while read < len(content) and (count := file.readinto(content.data[read:])):
                read += count
        return KeyRows.of_parts(_parts_in(content, name=path.name))

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[io.FileIO | None]:
        """Yield the file, or None if there is none that is new enough."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            yield None
            return
        with io.FileIO(descriptor) as file:
            yield file if self._is_new(os.fstat(descriptor)) else None

    def _is_new(self, status: os.stat_result) -> bool:
        return abs(self._clock() - status.st_mtime) < _AGE_MAX_S

    def _sweep(self, made: Path) -> None:
        """Delete the files that nobody will use, and what those left who died over it."""
        whole: list[tuple[float, Path]] = []
        for path in self._directory.iterdir():
            if path.suffix == _BEING_MADE:
                if (part := _locked(path, is_waiting=False)) is not None:
                    path.unlink(missing_ok=True)
                    os.close(part)
            elif path != made:
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    whole.append((status.st_mtime if self._is_new(status) else 0.0, path))
        for number, (written_s, path) in enumerate(sorted(whole, reverse=True)):
            if not written_s or number >= _FILES_MAX - 1:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def _not_shared(path: Path) -> Iterator[None]:
    """Go on without the file where it cannot be read or written."""
    try:
        yield
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        _log.warning("a table that was looked up is not shared at %s: %s", path, error)


def _check_owned(directory: Path) -> None:
    """Raise if another user could have put a file there."""
    status = directory.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"{directory} is not this user's alone to write to")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _part_of(path: Path) -> Path:
    return path.with_suffix(_BEING_MADE)


def _locked(path: Path, *, is_waiting: bool) -> int | None:
    """Return the file, locked until it is closed; None if another has it, or had it until now."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if is_waiting else fcntl.LOCK_NB))
        if _is_at(descriptor, path):
            return descriptor
    except BlockingIOError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


# -- a table as a file ---------------------------------------------------------------------------
#
# The CRC-32 of all that follows, that of the head and its length, the length of the head, the head
# as JSON, and from multiples of 64 bytes on the arrays; the last one is the rows, an Arrow stream.


def _write(parts: KeyRowsParts, descriptor: int, *, name: str, place: Any) -> None:
    rows = pa.BufferOutputStream()
    with pa.ipc.new_stream(rows, parts.rows.schema) as stream:
        stream.write_batch(parts.rows)
    arrays = [np.ascontiguousarray(array) for array in parts.arrays]
    arrays.append(np.frombuffer(rows.getvalue(), dtype=np.uint8))
    said = {
        "name": name,
        "place": place,
        "rows": parts.rows.num_rows,
        "facts": parts.facts,
        "shapes": [(array.dtype.str, array.shape) for array in arrays],
    }
    os.ftruncate(descriptor, 0)
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(bytes(_CHECKSUM_BYTES))
        checksum = 0
        for piece in _pieces(json.dumps(said).encode(), arrays):
            checksum = zlib.crc32(piece, checksum)
            file.write(piece)
        file.seek(0)
        file.write(_checksum(checksum))


def _pieces(head: bytes, arrays: list[npt.NDArray[Any]]) -> Iterator[bytes | memoryview]:
    sized = len(head).to_bytes(_LENGTH_BYTES, "little") + head
    yield _checksum(zlib.crc32(sized)) + sized
    start = _HEAD_START + len(head)
    for array in arrays:
        padding = -start % _ALIGNMENT
        yield bytes(padding)
        yield array.data.cast("B") if array.size else b""
        start += padding + array.nbytes


def _checksum(value: int) -> bytes:
    return value.to_bytes(_CHECKSUM_BYTES, "little")


def _memory(size: int) -> _Bytes:
    """Return so many bytes, in large pages where there are some: these are had in half the time."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


def _head_in(file: io.FileIO) -> _Head:
    status = os.fstat(file.fileno())
    start = os.pread(file.fileno(), _HEAD_START, 0)
    length = int.from_bytes(start[-_LENGTH_BYTES:], "little")
    if len(start) < _HEAD_START or length > _HEAD_BYTES_MAX:
        raise ValueError("it has no head")
    return _Head(_said_in(start + os.pread(file.fileno(), length, _HEAD_START)), status.st_mtime_ns)


def _said_in(head: bytes) -> dict[str, Any]:
    """Return what is said by a file that begins with these bytes."""
    sized = head[2 * _CHECKSUM_BYTES :]
    if _checksum(zlib.crc32(sized)) != head[_CHECKSUM_BYTES : 2 * _CHECKSUM_BYTES]:
        raise ValueError("its head has a wrong checksum")
    said: dict[str, Any] = json.loads(sized[_LENGTH_BYTES:])
    return said


def _parts_in(content: _Bytes, *, name: str) -> KeyRowsParts:
    if _checksum(zlib.crc32(content.data[_CHECKSUM_BYTES:])) != content[:_CHECKSUM_BYTES].tobytes():
        raise ValueError("its checksum is wrong")
    length = content[2 * _CHECKSUM_BYTES : _HEAD_START].tobytes()
    start = _HEAD_START + int.from_bytes(length, "little")
    said = _said_in(content[:start].tobytes())
    if said["name"] != name:
        raise ValueError("it is another table's")
    arrays: list[npt.NDArray[Any]] = []
    for kind, shape in said["shapes"]:
        start += -start % _ALIGNMENT
        array = np.ndarray(tuple(shape), dtype=kind, buffer=content.data, offset=start)
        arrays.append(array)
        start += array.nbytes
    rows = pa.ipc.open_stream(pa.py_buffer(arrays.pop())).read_next_batch()
    return KeyRowsParts(said["facts"], arrays, rows)
