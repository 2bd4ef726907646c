"""A full read of a table, shared by the tasks of one machine as a file of the executor.

Each task is a process of its own, and reading a table and building its index takes longer than
copying both. Invariants:

- The name of a file contains the lookup and the cut of the read. A task asks the service for the
  current cut before the task looks for the file, so a file never hides newer rows.
- If the cut has no file, a task takes the file of an earlier cut and applies the changes in memory.
  Only slow work is written: a full read, or many changes.
- The directory is Spark's own for this executor and is deleted with it. At most four files are
  kept. A file is not used for more than a minute after the full read, however many changes were
  applied since.
- A file with its final name is complete. The writer holds a lock until the end of the process.
  Meanwhile every further task waits, and makes the table itself if the file is still missing.
- A file with a wrong checksum or a wrong name inside is not used. If any step fails, the task reads
  the table by itself.
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
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.connector.lookup._key_rows import KeyRows, KeyRowsParts
from streamhouse.connector.lookup._whole_rows import SharedCut

__all__ = ["SharedTables", "shared_by_executor"]

_log = logging.getLogger(__name__)

_FILES_MAX: Final = 4
_AGE_MAX_S: Final = 60.0
_ADVANCED_SHARE: Final = 8
"""Changes up to one in this many rows are applied; for more, a full read is as quick."""
_SLOW_SHARE: Final = 32
"""A table with more than one change in this many rows is worth a file."""
_UNFINISHED: Final = ".part"
_ALIGNMENT: Final = 64
_CHECKSUM_BYTES: Final = 4
_LENGTH_BYTES: Final = 8
_HEAD_START: Final = 2 * _CHECKSUM_BYTES + _LENGTH_BYTES
_HEAD_BYTES_MAX: Final = 1 << 22

_Bytes = npt.NDArray[np.uint8]


def shared_by_executor() -> SharedTables | None:
    """Return the tables of this process's executor, or None outside an executor."""
    # Spark sets this variable for each process that runs tasks.
    directory = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0]
    return SharedTables(Path(directory, "streamhouse-lookup")) if directory else None


class _Head(NamedTuple):
    """The head of a file, and the time of the table's full read."""

    fields: dict[str, Any]
    read_ns: int


class _Earlier(NamedTuple):
    """A file of an earlier cut, and the number of changes since."""

    path: Path
    head: _Head
    changes: int

    @property
    def is_near(self) -> bool:
        return self.changes * _SLOW_SHARE <= int(self.head.fields["rows"])


class SharedTables:
    """Tables of a directory that only this user can write to."""

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._directory: Final = directory
        self._clock: Final = clock

    def load_once(self, cut: SharedCut) -> KeyRows:
        """Return the table at a cut or a later cut; without a usable file, load the table."""
        path = self._path_of(cut)
        lock = _part_of(path if cut.form is None else self._directory / _digest(cut.form))
        part = None
        tried: set[Path] = set()
        with _not_shared(path):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owned(self._directory)
            if (cached := self._read(path)) is not None:
                return cached
            if (advanced := self._advanced_earlier(cut, tried, is_near=True)) is not None:
                return advanced[0]
            part = _locked(lock, is_waiting=True)
        try:
            return self._loaded(cut, path, part, lock, tried)
        finally:
            if part is not None:
                with _not_shared(path):
                    if _is_at(part, lock):
                        lock.unlink()
                os.close(part)

    def _loaded(
        self, cut: SharedCut, path: Path, part: int | None, lock: Path, tried: set[Path]
    ) -> KeyRows:
        """Return the table while this task holds the lock; write the table to the locked file."""
        advanced = None
        with _not_shared(path):
            # The task that held the lock may have made this table, or a table of a near cut.
            if (cached := self._read(path)) is not None:
                return cached
            advanced = self._advanced_earlier(cut, tried)
        table, earlier = (cut.load(), None) if advanced is None else advanced
        if earlier is not None and earlier.is_near:
            return table
        if part is not None:
            with _not_shared(path):
                _write(table.parts(), part, name=path.name, place=cut.place)
                if earlier is not None:
                    os.utime(part, ns=(earlier.head.read_ns, earlier.head.read_ns))
                lock.rename(path)
                self._sweep(path)
        return table

    def _path_of(self, cut: SharedCut) -> Path:
        name = _digest(cut.name)
        return self._directory / (name if cut.form is None else f"{_digest(cut.form)}-{name}")

    def _nearest(self, cut: SharedCut) -> _Earlier | None:
        """Return the file of the earlier cut with the fewest changes since."""
        if cut.form is None:
            return None
        candidates: list[_Earlier] = []
        for path in self._directory.glob(f"{_digest(cut.form)}-*"):
            with _not_shared(path):
                head = self._head_of(path)
                if head is None:
                    continue
                changes = cut.since(head.fields["place"])
                if changes is not None and changes * _ADVANCED_SHARE <= head.fields["rows"]:
                    candidates.append(_Earlier(path, head, changes))
        return min(candidates, key=lambda each: each.changes, default=None)

    def _advanced_earlier(
        self, cut: SharedCut, tried: set[Path], *, is_near: bool = False
    ) -> tuple[KeyRows, _Earlier] | None:
        """Return the nearest earlier cut's table with the changes since, and the cut's file."""
        earlier = self._nearest(cut)
        if earlier is None or earlier.path in tried or (is_near and not earlier.is_near):
            return None
        tried.add(earlier.path)
        table = None
        with _not_shared(earlier.path):
            earlier_table = self._read(earlier.path)
            table = (
                None
                if earlier_table is None
                else cut.advance(earlier_table, earlier.head.fields["place"])
            )
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
        """Yield the file, or None if it is missing or too old."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            yield None
            return
        with io.FileIO(descriptor) as file:
            yield file if self._is_new(os.fstat(descriptor)) else None

    def _is_new(self, status: os.stat_result) -> bool:
        return abs(self._clock() - status.st_mtime) < _AGE_MAX_S

    def _sweep(self, new_path: Path) -> None:
        """Delete files that are too old or too many, and unfinished files of dead tasks."""
        whole: list[tuple[float, Path]] = []
        for path in self._directory.iterdir():
            if path.suffix == _UNFINISHED:
                if (part := _locked(path, is_waiting=False)) is not None:
                    path.unlink(missing_ok=True)
                    os.close(part)
            elif path != new_path:
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    whole.append((status.st_mtime if self._is_new(status) else 0.0, path))
        for number, (written_s, path) in enumerate(sorted(whole, reverse=True)):
            if not written_s or number >= _FILES_MAX - 1:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def _not_shared(path: Path) -> Iterator[None]:
    """Go on without the file if it cannot be read or written."""
    try:
        yield
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        _log.warning("the table of a lookup is not shared at %s: %s", path, error)


def _check_owned(directory: Path) -> None:
    """Raise if another user can write to the directory."""
    status = directory.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"{directory} is not this user's alone to write to")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _part_of(path: Path) -> Path:
    return path.with_suffix(_UNFINISHED)


def _locked(path: Path, *, is_waiting: bool) -> int | None:
    """Return the file, locked until closed; None if the lock is held or was just released."""
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
# The layout: the CRC-32 of the bytes that follow, the CRC-32 of the head and its length, the length
# of the head, the head as JSON, and the arrays, each from a multiple of 64 bytes on. The last array
# is the rows, an Arrow stream.


def _write(parts: KeyRowsParts, descriptor: int, *, name: str, place: Any) -> None:
    rows = pa.BufferOutputStream()
    with pa.ipc.new_stream(rows, parts.rows.schema) as stream:
        stream.write_batch(parts.rows)
    arrays = [np.ascontiguousarray(array) for array in parts.arrays]
    arrays.append(np.frombuffer(rows.getvalue(), dtype=np.uint8))
    head = {
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
        for piece in _pieces(json.dumps(head).encode(), arrays):
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
    """Return memory of this size, in large pages where possible, which halves the time."""
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
    return _Head(
        _parsed_head(start + os.pread(file.fileno(), length, _HEAD_START)), status.st_mtime_ns
    )


def _parsed_head(head: bytes) -> dict[str, Any]:
    """Parse the head of a file from the first bytes of the file."""
    sized = head[2 * _CHECKSUM_BYTES :]
    if _checksum(zlib.crc32(sized)) != head[_CHECKSUM_BYTES : 2 * _CHECKSUM_BYTES]:
        raise ValueError("its head has a wrong checksum")
    values: dict[str, Any] = json.loads(sized[_LENGTH_BYTES:])
    return values


def _parts_in(content: _Bytes, *, name: str) -> KeyRowsParts:
    if _checksum(zlib.crc32(content.data[_CHECKSUM_BYTES:])) != content[:_CHECKSUM_BYTES].tobytes():
        raise ValueError("its checksum is wrong")
    length = content[2 * _CHECKSUM_BYTES : _HEAD_START].tobytes()
    start = _HEAD_START + int.from_bytes(length, "little")
    head = _parsed_head(content[:start].tobytes())
    if head["name"] != name:
        raise ValueError("it is another table's")
    arrays: list[npt.NDArray[Any]] = []
    for kind, shape in head["shapes"]:
        start += -start % _ALIGNMENT
        array = np.ndarray(tuple(shape), dtype=kind, buffer=content.data, offset=start)
        arrays.append(array)
        start += array.nbytes
    rows = pa.ipc.open_stream(pa.py_buffer(arrays.pop())).read_next_batch()
    return KeyRowsParts(head["facts"], arrays, rows)
