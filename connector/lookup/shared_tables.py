"""A whole table that the tasks of one machine read once, as a file of the executor's own.

Each task runs in a process of its own, and a table with its index takes longer to read and to make
than to copy. Invariants:

- A file is named for what is looked up and for the cut that it was read at. Each task asks the
  service for the cut before it looks for the file, so it never sees less than it would have read.
- The directory is Spark's own for this executor, which goes with it. At most four files are kept,
  and none is used that is older than a minute.
- A file is whole once it has its name. Who makes it holds a lock that goes with the process; others
  wait, and make it themselves if there is none afterwards.
- A file that has another checksum or name than it was written with is not used. Where anything of
  this fails the task reads the table by itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.connector.lookup.key_rows import KeyRows, KeyRowsParts

__all__ = ["SharedTables", "shared_by_executor"]

_log = logging.getLogger(__name__)

_FILES_MAX: Final = 4
_AGE_MAX_S: Final = 60.0
_BEING_MADE: Final = ".part"
_ALIGNMENT: Final = 64
_LENGTH_BYTES: Final = 8
_CHECKSUM_BYTES: Final = 4

_Bytes = npt.NDArray[np.uint8]


def shared_by_executor() -> SharedTables | None:
    """Return the tables of the executor that this process works for, if it works for one."""
    # Spark sets it for each process that runs tasks.
    directory = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0]
    return SharedTables(Path(directory, "streamhouse-lookup")) if directory else None


class SharedTables:
    """Tables of a directory that this user alone can write to."""

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._directory: Final = directory
        self._clock: Final = clock

    def made_once(self, what: str, make: Callable[[], KeyRows]) -> KeyRows:
        """Return the table that `what` tells from all others; `make` it if it is not there."""
        path = self._directory / hashlib.sha256(what.encode()).hexdigest()
        with self._turn_at(path) as (known, part):
            if known is not None:
                return known
            made = make()
            if part is not None:
                with _not_shared(path):
                    _write(made.parts(), part, name=path.name)
                    _part_of(path).rename(path)
                    self._sweep(path)
            return made

    @contextlib.contextmanager
    def _turn_at(self, path: Path) -> Iterator[tuple[KeyRows | None, int | None]]:
        """Yield the table; or, once nobody else makes it, None and the file to write it to."""
        known = part = None
        with _not_shared(path):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owned(self._directory)
            known = self._read(path)
            if known is None:
                part = _locked(_part_of(path), is_waiting=True)
                # Whoever was waited for may have made it.
                known = self._read(path)
        try:
            yield known, part
        finally:
            if part is not None:
                with _not_shared(path):
                    if _is_at(part, _part_of(path)):
                        _part_of(path).unlink()
                os.close(part)

    def _read(self, path: Path) -> KeyRows | None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if not self._is_new(status):
                return None
            content = np.empty(status.st_size, dtype=np.uint8)
            read = 0
            while read < len(content) and (count := file.readinto(content.data[read:])):
                read += count
        return KeyRows.of_parts(_parts_in(content, name=path.name))

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
# The CRC-32 of all that follows, the length of the head, the head as JSON, and from multiples of
# 64 bytes on the arrays; the last one is the rows as an Arrow stream.


def _write(parts: KeyRowsParts, descriptor: int, *, name: str) -> None:
    rows = pa.BufferOutputStream()
    with pa.ipc.new_stream(rows, parts.rows.schema) as stream:
        stream.write_batch(parts.rows)
    arrays = [np.ascontiguousarray(array) for array in parts.arrays]
    arrays.append(np.frombuffer(rows.getvalue(), dtype=np.uint8))
    shapes = [(array.dtype.str, array.shape) for array in arrays]
    head = json.dumps({"name": name, "facts": parts.facts, "shapes": shapes}).encode()
    os.ftruncate(descriptor, 0)
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(bytes(_CHECKSUM_BYTES))
        checksum = 0
        for piece in _pieces(head, arrays):
            checksum = zlib.crc32(piece, checksum)
            file.write(piece)
        file.seek(0)
        file.write(checksum.to_bytes(_CHECKSUM_BYTES, "little"))


def _pieces(head: bytes, arrays: list[npt.NDArray[Any]]) -> Iterator[bytes | memoryview]:
    start = _CHECKSUM_BYTES + _LENGTH_BYTES + len(head)
    yield len(head).to_bytes(_LENGTH_BYTES, "little") + head
    for array in arrays:
        padding = -start % _ALIGNMENT
        yield bytes(padding)
        yield array.data.cast("B") if array.size else b""
        start += padding + array.nbytes


def _parts_in(content: _Bytes, *, name: str) -> KeyRowsParts:
    checksum = int.from_bytes(content[:_CHECKSUM_BYTES].tobytes(), "little")
    if zlib.crc32(content.data[_CHECKSUM_BYTES:]) != checksum:
        raise ValueError("its checksum is wrong")
    head_start = _CHECKSUM_BYTES + _LENGTH_BYTES
    start = head_start + int.from_bytes(content[_CHECKSUM_BYTES:head_start].tobytes(), "little")
    head: dict[str, Any] = json.loads(content[head_start:start].tobytes())
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
