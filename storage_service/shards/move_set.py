"""The files of one table in the store, on their way from a shard to another.

```
moves/<source shard>/<move id>/<file:06d>-<piece:06d>   some bytes of a file
moves/<source shard>/<move id>/files                     which files, how long, with which checksums
```

Only the source writes and deletes them. What the destination reads it checks: path, length and
checksum of every file; and it writes them by its own `Filesystem`, so that its journal has them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from crc32c import crc32c

from streamhouse.storage_service.backoff import Backoff
from streamhouse.storage_service.errors import CorruptDataError, UnavailableError
from streamhouse.storage_service.journal.operations import is_journalled
from streamhouse.storage_service.journal.store.object_store import (
    LIST_COUNT_MAX,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectStore,
    ObjectStoreError,
    StoreUnavailableError,
)
from streamhouse.storage_service.log.filesystem import Filesystem, replace_durably
from streamhouse.storage_service.shards.entries import check_shard_name, seal, unseal
from streamhouse.storage_service.shards.tickets import MoveTicket

__all__ = ["MoveSet", "clear_moves"]

_T = TypeVar("_T")

_FOLDER: Final = "moves"
_PIECE_BYTES: Final = 8 << 20
_LIST_BYTES_MAX: Final = 64 << 20
_FILE_BYTES_MAX: Final = 1 << 40
_LOG: Final = ".log"
_ATTEMPTS: Final = 6
_BACKOFF: Final = Backoff(first_s=0.05, most_s=2.0)


@dataclass(frozen=True, slots=True)
class _File:
    """`path` is relative to the data directory."""

    path: str
    size_bytes: int
    checksum: int


class MoveSet:
    """The files of one move. Blocking."""

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

    def upload(self, root: Path) -> None:
        """Store every file of the table that a journal has; nobody changes them meanwhile."""
        found: list[_File] = []
        for path in sorted((root / self._table).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.is_file() and is_journalled(name):
                found.append(self._upload_file(path, name, len(found)))
        content = {"ticket": self._ticket.to_json(), "files": [_to_json(file) for file in found]}
        key = f"{self._folder}files"
        self._create(key, seal(key, content, nonce=self._ticket.move_id))

    def _upload_file(self, path: Path, name: str, number: int) -> _File:
        size_bytes, checksum = 0, 0
        with path.open("rb") as reading:
            for piece in range(10**6):
                data = reading.read(self._piece_bytes)
                if not data:
                    break
                self._create(self._piece(number, piece), data)
                size_bytes += len(data)
                checksum = crc32c(data, checksum)
        return _File(name, size_bytes, checksum)

    def _create(self, key: str, data: bytes) -> None:
        def create() -> None:
            try:
                self._store.create(key, [data])
            except ObjectExistsError:
                # Nobody else knows the move's id: an answer was lost, or there was a race.
                try:
                    self._store.get_range(key, start=0, length=len(data))
                except ObjectNotFoundError as error:
                    raise StoreUnavailableError(f"{key} is not there yet") from error

        self._keep_trying(create)

    def download(self, root: Path, filesystem: Filesystem) -> None:
        """Write every file of the table, durably. Raises `CorruptDataError`, `OSError`."""
        files = self._files()
        folders = {root / self._table, root / self._table / "transactions"}
        folders |= {(root / file.path).parent for file in files}
        for folder in sorted(folders):
            filesystem.make_directory(folder)
        for number, file in enumerate(files):
            self._download_file(root / file.path, file, number, filesystem)
        for folder in sorted(folders, reverse=True):
            filesystem.sync_directory(folder)
        filesystem.sync_directory(root / "tables")

    def _download_file(self, path: Path, file: _File, number: int, filesystem: Filesystem) -> None:
        if not file.path.endswith(_LOG):
            replace_durably(filesystem, path, list(self._pieces(file, number)))
            return
        # A log may be larger than an object of a journal should be: it grows, as logs do.
        pieces = self._pieces(file, number)
        first = next(pieces, b"")
        replace_durably(filesystem, path, [first])
        position, log = len(first), None
        try:
            for piece in pieces:
                log = log or filesystem.open(path)
                log.write([piece], position=position)
                log.sync()
                position += len(piece)
        finally:
            if log is not None:
                log.close()

    def _pieces(self, file: _File, number: int) -> Iterator[bytes]:
        """Return the bytes of a file; the last ones only if all of them are right."""
        left, checksum = file.size_bytes, 0
        for piece in range(-(-left // self._piece_bytes)):
            key = self._piece(number, piece)
            data = bytes(self._get(key, bytes_max=self._piece_bytes))
            left -= len(data)
            checksum = crc32c(data, checksum)
            is_last = left <= 0
            if len(data) != min(self._piece_bytes, left + len(data)) or (
                is_last and checksum != file.checksum
            ):
                raise CorruptDataError(f"{key} in the store is damaged: {file.path} is not whole")
            yield data

    def _files(self) -> list[_File]:
        key = f"{self._folder}files"
        content = unseal(key, bytes(self._get(key, bytes_max=_LIST_BYTES_MAX)))
        try:
            files = [
                _File(str(file["path"]), int(file["size_bytes"]), int(file["checksum"]))
                for file in content["files"]
            ]
            is_right = MoveTicket.from_json(content["ticket"]) == self._ticket
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(f"{key} in the store says not which files: {error!r}") from error
        is_right &= len({file.path for file in files}) == len(files)
        for file in files:
            is_right &= file.path.startswith(f"{self._table}/") and is_journalled(file.path)
            is_right &= 0 <= file.size_bytes <= _FILE_BYTES_MAX
        if not is_right:
            raise CorruptDataError(f"{key} in the store names files that cannot be of this move")
        return files

    def delete(self) -> None:
        """Delete all of it. Nothing there is fine."""
        _delete_below(self._store, self._folder)

    def _get(self, key: str, *, bytes_max: int) -> memoryview:
        return self._keep_trying(lambda: self._store.get(key, bytes_max=bytes_max))

    def _keep_trying(self, do: Callable[[], _T]) -> _T:
        for attempt in range(1, _ATTEMPTS):
            try:
                return do()
            except StoreUnavailableError:
                self._sleep(_BACKOFF.after(attempt))
            except ObjectStoreError as error:
                raise _unavailable(self._ticket, error) from error
        try:
            return do()
        except ObjectStoreError as error:
            raise _unavailable(self._ticket, error) from error

    def _piece(self, number: int, piece: int) -> str:
        return f"{self._folder}{number:06d}-{piece:06d}"


def clear_moves(store: ObjectStore, shard: str) -> None:
    """Delete what moves from `shard` have left, none of which is under way."""
    check_shard_name(shard)
    _delete_below(store, f"{_FOLDER}/{shard}/")


def _delete_below(store: ObjectStore, folder: str) -> None:
    while True:
        keys = [entry.key for entry in store.list_objects(folder)]
        if keys:
            store.delete(keys)
        if len(keys) < LIST_COUNT_MAX:
            return


def _to_json(file: _File) -> dict[str, Any]:
    return {"path": file.path, "size_bytes": file.size_bytes, "checksum": file.checksum}


def _unavailable(ticket: MoveTicket, error: ObjectStoreError) -> UnavailableError:
    return UnavailableError(
        f"table '{ticket.path}' cannot be moved: the files on their way in the store: {error}"
    )
