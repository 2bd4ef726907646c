"""The files of one table in the store, while the table moves from a shard to another.

```
moves/<source shard>/<move id>/<pass:04d>/<part:06d>-<piece:06d>   some bytes of a file
moves/<source shard>/<move id>/<pass:04d>/parts                     which bytes of which files
```

All passes but the last run while the table is open and send immutable bytes only: the durable bytes
of logs and a copy of the rows by key. The last pass has the remaining bytes, and the list of
files. Only the source writes and deletes these objects. The destination checks all it reads: path,
place, length and checksum. The destination writes the files through its `Filesystem`, and hence its
journal; only rows by key are in no journal.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, TypeVar

from crc32c import crc32c

from streamhouse.core.backoff import Backoff
from streamhouse.core.errors import CorruptDataError, UnavailableError
from streamhouse.storage_service.log.filesystem import Filesystem, WritableFile, replace_durably
from streamhouse.storage_service.ownership.journal.operations import is_journalled
from streamhouse.storage_service.ownership.journal.store.object_store import (
    LIST_COUNT_MAX,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectStore,
    ObjectStoreError,
    StoreUnavailableError,
)
from streamhouse.storage_service.ownership.shards.entries import check_shard_name, seal, unseal
from streamhouse.storage_service.ownership.shards.tickets import MoveTicket

__all__ = ["MoveSet", "SentFiles", "clear_moves"]

_T = TypeVar("_T")

_FOLDER: Final = "moves"
_PIECE_BYTES: Final = 8 << 20
_PARTS_BYTES_MAX: Final = 64 << 20
_FILE_BYTES_MAX: Final = 1 << 40
_LOG: Final = ".log"
_NEVER_CHANGE: Final = {".index", ".writers"}
# A bucket's RocksDB file; checkpoints allow the same names.
_KEY_FILE: Final = re.compile(
    r"tables/[0-9]{1,19}/bucket-[0-9]{1,19}/kv/[A-Za-z0-9][A-Za-z0-9_.-]{0,99}"
)
_ATTEMPTS: Final = 6
_BACKOFF: Final = Backoff(first_s=0.05, most_s=2.0)


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes of a file after its first `position` bytes; 0: the file is new, or replaced.

    `path` is relative to the data directory.
    """

    path: str
    position: int
    size_bytes: int
    checksum: int


class MoveSet:
    """The objects of one move in the store. Blocking."""

    def __init__(
        self,
        store: ObjectStore,
        ticket: MoveTicket,
        *,
        piece_bytes: int = _PIECE_BYTES,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._store = store
        self._piece_bytes = piece_bytes
        self._ticket = ticket
        self._folder = f"{_FOLDER}/{ticket.source}/{ticket.move_id}/"
        self._table = f"tables/{ticket.table_id}"
        self._sleep = sleep

    def delete(self) -> None:
        """Delete all objects of the move. Without objects nothing happens."""
        _delete_below(self._store, self._folder)

    # -- the source --------------------------------------------------------------------------------

    def put(self, number: int, part: int, data: Iterator[bytes]) -> tuple[int, int]:
        """Store the bytes of a part of a pass; return their number and checksum."""
        size_bytes, checksum = 0, 0
        for piece, some in enumerate(data):
            self._create(self._piece(number, part, piece), some)
            size_bytes += len(some)
            checksum = crc32c(some, checksum)
        return size_bytes, checksum

    def end_pass(
        self, number: int, parts: Sequence[_Part], whole: Mapping[str, int] | None
    ) -> None:
        """Store the parts of a pass; `whole` has all files, in the last pass only."""
        key = self._parts(number)
        content = {
            "ticket": self._ticket.to_json(),
            "parts": [asdict(part) for part in parts],
            "whole": None if whole is None else dict(whole),
        }
        self._create(key, seal(key, content, nonce=self._ticket.move_id))

    def pieces_of(self, path: Path, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of a file from `start` to `end`, in pieces; raises `OSError`."""
        with path.open("rb") as reading:
            reading.seek(start)
            while start < end:
                data = reading.read(min(self._piece_bytes, end - start))
                if not data:
                    raise OSError(0, f"{path} ends before byte {end}")
                start += len(data)
                yield data

    def _create(self, key: str, data: bytes) -> None:
        def create() -> None:
            try:
                self._store.create(key, [data])
            except ObjectExistsError:
                # Only this process knows the move's id: an answer was lost, or a race happened.
                try:
                    self._store.get_range(key, start=0, length=len(data))
                except ObjectNotFoundError as error:
                    raise StoreUnavailableError(f"{key} is not there yet") from error

        self._keep_trying(create)

    # -- the destination ---------------------------------------------------------------------------

    def download(self, number: int, root: Path, filesystem: Filesystem) -> bool:
        """Apply a pass, durably; return whether the pass was the last.

        Passes are applied in order, each once. Raises `CorruptDataError`, `OSError`.
        """
        parts, whole = self._read_parts(number)
        if number == 0:
            filesystem.make_directory(root / self._table)
            filesystem.make_directory(root / self._table / "transactions")
        folders = {(root / part.path).parent for part in parts}
        for folder in sorted(folders):
            filesystem.make_directory(folder)
        for place, part in enumerate(parts):
            self._download(part, number, place, root / part.path, filesystem)
        if whole is not None:
            self._check_whole(whole, root, filesystem)
        folders |= {root / self._table, root / self._table / "transactions"}
        folders |= {folder.parent for folder in folders if folder.name == "kv"}
        for folder in sorted(folders, reverse=True):
            filesystem.sync_directory(folder)
        filesystem.sync_directory(root / "tables")
        return whole is not None

    def _download(
        self, part: _Part, number: int, place: int, path: Path, filesystem: Filesystem
    ) -> None:
        pieces = self._pieces(part, number, place)
        if _KEY_FILE.fullmatch(part.path):
            _write(filesystem.create(path), pieces, 0)
            return
        if not path.name.endswith(_LOG):
            replace_durably(filesystem, path, list(pieces))
            return
        # A log may be too large for one object of a journal, so the file is appended to in pieces.
        position = part.position
        if position == 0:
            first = next(pieces, b"")
            replace_durably(filesystem, path, [first])
            position = len(first)
        elif filesystem.size_bytes(path) != position:
            raise CorruptDataError(f"{path} is not as long as the pass before has left it")
        if position < part.position + part.size_bytes:
            _write(filesystem.open(path), pieces, position)

    def _pieces(self, part: _Part, number: int, place: int) -> Iterator[bytes]:
        """Yield the bytes of a part; the last piece only after checking the part's checksum."""
        remaining_bytes, checksum = part.size_bytes, 0
        for piece in range(-(-remaining_bytes // self._piece_bytes)):
            key = self._piece(number, place, piece)
            data = bytes(self._get(key, bytes_max=self._piece_bytes))
            remaining_bytes -= len(data)
            checksum = crc32c(data, checksum)
            is_last = remaining_bytes <= 0
            if len(data) != min(self._piece_bytes, remaining_bytes + len(data)) or (
                is_last and checksum != part.checksum
            ):
                raise CorruptDataError(f"{key} in the store is damaged: {part.path} is not whole")
            yield data

    def _check_whole(self, whole: Mapping[str, int], root: Path, filesystem: Filesystem) -> None:
        """Remove files deleted at the source; raise for any other difference."""
        local_sizes = {}
        for path in sorted((root / self._table).rglob("*")):
            name = path.relative_to(root).as_posix()
            if not path.is_file() or not is_journalled(name):
                continue
            if name not in whole:
                filesystem.remove(path)
            else:
                local_sizes[name] = path.stat().st_size
        if local_sizes != dict(whole):
            raise CorruptDataError(f"the files of {self._table} in the store are not whole")

    def _read_parts(self, number: int) -> tuple[list[_Part], dict[str, int] | None]:
        key = self._parts(number)
        content = unseal(key, bytes(self._get(key, bytes_max=_PARTS_BYTES_MAX)))
        try:
            parts = [
                _Part(
                    str(part["path"]),
                    int(part["position"]),
                    int(part["size_bytes"]),
                    int(part["checksum"]),
                )
                for part in content["parts"]
            ]
            whole = content["whole"]
            if whole is not None:
                whole = {str(path): int(size_bytes) for path, size_bytes in whole.items()}
            is_right = MoveTicket.from_json(content["ticket"]) == self._ticket
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptDataError(
                f"{key} in the store is no valid list of files: {error!r}"
            ) from error
        is_right &= len({part.path for part in parts}) == len(parts)
        for part in parts:
            is_right &= part.path.startswith(f"{self._table}/")
            is_right &= is_journalled(part.path) or _KEY_FILE.fullmatch(part.path) is not None
            is_right &= part.position == 0 or _is_log(part.path)
            is_right &= 0 <= part.position <= _FILE_BYTES_MAX
            is_right &= 0 <= part.size_bytes <= _FILE_BYTES_MAX
        if not is_right:
            raise CorruptDataError(f"{key} in the store names files that cannot be of this move")
        return parts, whole

    def _get(self, key: str, *, bytes_max: int) -> memoryview:
        return self._keep_trying(lambda: self._store.get(key, bytes_max=bytes_max))

    def _keep_trying(self, do: Callable[[], _T]) -> _T:
        # Not `keep_trying` of the journal, which owns its shard: a move is given up instead.
        for attempt in itertools.count(1):
            try:
                return do()
            except ObjectStoreError as error:
                if attempt == _ATTEMPTS or not isinstance(error, StoreUnavailableError):
                    raise _unavailable(self._ticket, error) from error
            self._sleep(_BACKOFF.after(attempt))
        raise AssertionError

    def _piece(self, number: int, part: int, piece: int) -> str:
        return f"{self._folder}{number:04d}/{part:06d}-{piece:06d}"

    def _parts(self, number: int) -> str:
        return f"{self._folder}{number:04d}/parts"


@dataclass(frozen=True, slots=True)
class _Sent:
    """A file's state after the passes so far."""

    inode: int
    size_bytes: int
    checksum: int


class SentFiles:
    """The source's side of a move: the bytes of each file in its passes. Blocking."""

    def __init__(self, moves: MoveSet, root: Path, table_id: int) -> None:
        self._moves = moves
        self._root = root
        self._folder = root / "tables" / str(table_id)
        self._sent: dict[str, _Sent] = {}
        self._parts: list[_Part] = []
        self.passes = 0
        """The number of complete passes in the store."""

    def send_stable(self, logs: Sequence[tuple[Path, int]], rows: Mapping[str, Path]) -> int:
        """Store a pass of an open table; return the number of bytes.

        `logs` has the immutable length of each log, `rows` the copies of rows by key, by bucket.
        Files removed meanwhile are skipped: the last pass has the final list.
        """
        for path, size_bytes in logs:
            with contextlib.suppress(FileNotFoundError):
                self._send_log(path, size_bytes)
            for suffix in _NEVER_CHANGE:
                with contextlib.suppress(FileNotFoundError):
                    self._send_whole(path.with_suffix(suffix))
        for bucket, copy in sorted(rows.items()):
            for path in sorted(copy.iterdir()):
                name = f"{bucket}/kv/{path.name}"
                if path.is_file() and _KEY_FILE.fullmatch(name):
                    self._send(name, path, 0, path.stat().st_size)
        return self._end_pass(None)

    def send_rest(self) -> int:
        """Store the last pass: all journalled files of a table closed for changes."""
        whole: dict[str, int] = {}
        for path in sorted(self._folder.rglob("*")):
            name = self._name(path)
            if not path.is_file() or not is_journalled(name):
                continue
            if _is_log(name):
                self._send_log(path, path.stat().st_size)
            else:
                self._send_whole(path)
            whole[name] = self._sent[name].size_bytes
        return self._end_pass(whole)

    def _send_log(self, path: Path, size_bytes: int) -> None:
        name, inode = self._name(path), path.stat().st_ino
        sent = self._sent.get(name)
        if sent is not None and (sent.inode != inode or sent.size_bytes > size_bytes):
            sent = None
        start = 0 if sent is None else sent.size_bytes
        if sent is None or start < size_bytes:
            self._send(name, path, start, size_bytes)

    def _send_whole(self, path: Path) -> None:
        name, stat, checksum = self._name(path), path.stat(), 0
        for data in self._moves.pieces_of(path, 0, stat.st_size):
            checksum = crc32c(data, checksum)
        sent = self._sent.get(name)
        if sent is None or (sent.size_bytes, sent.checksum) != (stat.st_size, checksum):
            self._send(name, path, 0, stat.st_size)

    def _send(self, name: str, path: Path, start: int, end: int) -> None:
        inode = path.stat().st_ino
        pieces = self._moves.pieces_of(path, start, end)
        size_bytes, checksum = self._moves.put(self.passes, len(self._parts), pieces)
        self._parts.append(_Part(name, start, size_bytes, checksum))
        self._sent[name] = _Sent(inode, start + size_bytes, checksum)

    def _end_pass(self, whole: Mapping[str, int] | None) -> int:
        self._moves.end_pass(self.passes, self._parts, whole)
        size_bytes = sum(part.size_bytes for part in self._parts)
        self.passes, self._parts = self.passes + 1, []
        return size_bytes

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()


def clear_moves(store: ObjectStore, shard: str) -> None:
    """Delete the leftovers of moves from `shard`; no move may be running."""
    check_shard_name(shard)
    _delete_below(store, f"{_FOLDER}/{shard}/")


def _delete_below(store: ObjectStore, folder: str) -> None:
    while True:
        keys = [entry.key for entry in store.list_objects(folder)]
        if keys:
            store.delete(keys)
        if len(keys) < LIST_COUNT_MAX:
            return


def _write(file: WritableFile, pieces: Iterator[bytes], position: int) -> None:
    """Write `pieces` behind the first `position` bytes of a file, durably; closes the file."""
    try:
        for piece in pieces:
            file.write([piece], position=position)
            file.sync()
            position += len(piece)
    finally:
        file.close()


def _is_log(path: str) -> bool:
    return path.endswith(_LOG) and is_journalled(path)


def _unavailable(ticket: MoveTicket, error: ObjectStoreError) -> UnavailableError:
    return UnavailableError(
        f"table '{ticket.path}' cannot be moved: the files on their way in the store: {error}"
    )
