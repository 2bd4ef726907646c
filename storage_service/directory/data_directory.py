"""The data directory: owner, format, and paths.

    LOCK                          flock of the one process that uses the directory
    service.json                  format version, service id, next table id, databases, tables
    tables/<table_id>/table.json  the table
    tables/<table_id>/lake.json   lake snapshot, tiered offsets, tiering epoch
    tables/<table_id>/lake_pins.json  lake snapshots that readers have pinned
        tables/<table_id>/consumers.json  the positions that readers have reported
        tables/<table_id>/record_schemas.json  Avro schemas that records name by id
        tables/<table_id>/live_places.json  where folders of live cuts are
    tables/<table_id>/row_ages.json  offsets by time, of a primary key table whose rows age
    tables/<table_id>/bucket-<b>/ the log of one bucket
    tables/<table_id>/bucket-<b>/kv/ the rows by key of one bucket of a primary key table
    tables/<table_id>/transactions/ staged rows and decisions of transactions
        tables/<table_id>.dropped/    a dropped table, named so in service.json, during its deletion
        tables/<table_id>.given-up/   a damaged table that was dropped, or a table replaced by the
                                      lake's history; nothing deletes it
    lake/                         the default Iceberg catalog and warehouse
        backup.staged/                a staged backup

The directory is private to its owner (mode 700): no other user can read a table on the disk. Every
durable change goes through the directory's `filesystem`. Exceptions are RocksDB's files below `kv`,
the lake, staged backups, and LOCK. No path contains user input: table directories are named by id.
Every JSON file is sealed (state_file.py); a table of an older release is in `former` until its
first opening.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time
from pathlib import Path
from typing import Final

from streamhouse.core.errors import InvalidRequestError, UnavailableError
from streamhouse.storage_service.directory.state_file import StateFile, StateIdentity
from streamhouse.storage_service.log.filesystem import Filesystem, LocalFilesystem

__all__ = ["DECISION_SUFFIX", "DataDirectory", "lock"]

_logger = logging.getLogger(__name__)

PRIVATE: Final = 0o700
# The kernel kills the readers of an owner that dies, at once.
_CHILDREN_END_S: Final = 10.0
_CHILDREN_LOOK_S: Final = 0.01
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
DECISION_SUFFIX: Final = ".decision"
"""Of a file below `transactions`: a decided transaction."""
DROPPED_SUFFIX: Final = ".dropped"
GIVEN_UP_SUFFIX: Final = ".given-up"


class DataDirectory:
    """A data directory; after `open` it is locked exclusively until `close`."""

    def __init__(self, path: Path, lock_descriptor: int | None = None) -> None:
        self.path = path
        self._lock_descriptor: int | None = lock_descriptor
        self.filesystem: Filesystem = LocalFilesystem()
        """The filesystem of all changes; may be replaced before the first table is opened."""
        self.service_id = ""
        """Empty until service.json was read."""
        self.former: set[int] = set()
        """Ids of tables whose files may have the format without checksums."""

    @classmethod
    def open(cls, path: Path) -> DataDirectory:
        """Create the directory if needed and lock it.

        Raises `UnavailableError` if another process holds the lock, `InvalidRequestError` if the
        directory cannot be used.
        """
        path = path.absolute()
        try:
            path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            _make_private(path)
            filesystem = LocalFilesystem()
            for directory in (path / "tables", path / "lake" / "warehouse"):
                filesystem.make_directory(directory)
            descriptor = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidRequestError(
                f"data directory {path} cannot be used: {error.strerror}"
            ) from error
        try:
            lock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            owner = _owner_of(descriptor)
            os.close(descriptor)
            raise UnavailableError(
                f"data directory {path} is in use by another streamhouse service"
                f"{f' (process {owner})' if owner else ''}; stop it, or use another --data-dir"
            ) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        filesystem.sync_directory(path.parent)
        return cls(path, descriptor)

    @property
    def lock_descriptor(self) -> int:
        """The file of the lock; a child with the file holds the lock, too, until the child ends."""
        assert self._lock_descriptor is not None
        return self._lock_descriptor

    @property
    def place(self) -> str:
        """An identity of the directory's place: a copy has another one, and so has the disk in
        another machine. A process with the lock at the same place knows the former owner's end.
        Empty where the system has no id of the kernel's start.
        """
        if self._lock_descriptor is None:
            return ""
        try:
            boot_id = _BOOT_ID.read_text("ascii").strip()
        except (OSError, ValueError):
            return ""
        lock = os.fstat(self._lock_descriptor)
        return f"{boot_id} {lock.st_dev} {lock.st_ino}" if boot_id else ""

    @property
    def service_file(self) -> Path:
        """The file with the state of all tables together."""
        return self.path / "service.json"

    @property
    def service_file_hint(self) -> str:
        """Advice for a damaged, old or missing service.json."""
        return (
            "put the newest one back, or make it anew from the tables with `streamhouse check"
            f" --data-dir {self.path} --rebuild-service-file`"
        )

    @property
    def service_state(self) -> StateFile:
        """The `service_file`, to load and save; any service's file, without a `service_id`."""
        identity = StateIdentity(kind="service", service_id=self.service_id)
        return StateFile(
            path=self.service_file,
            identity=identity,
            filesystem=self.filesystem,
            is_former=not self.service_id,
        )

    def state_of(self, table_id: int, kind: str) -> StateIdentity:
        """Return the identity that a table's file of this kind must state."""
        return StateIdentity(kind=kind, service_id=self.service_id, table_id=table_id)

    def _table_state(self, table_id: int, kind: str) -> StateFile:
        return StateFile(
            path=self.table(table_id) / f"{kind}.json",
            identity=self.state_of(table_id, kind),
            filesystem=self.filesystem,
            is_former=table_id in self.former,
        )

    @property
    def tables(self) -> Path:
        """The directory with one directory a table."""
        return self.path / "tables"

    def table(self, table_id: int) -> Path:
        """Return the directory of one table."""
        return self.tables / str(table_id)

    def table_file(self, table_id: int) -> StateFile:
        """Return the file of a table's descriptor."""
        return self._table_state(table_id, "table")

    def lake_file(self, table_id: int) -> StateFile:
        """Return the file of a table's lake state."""
        return self._table_state(table_id, "lake")

    def lake_pins_file(self, table_id: int) -> StateFile:
        """Return the file of a table's lake pins; the first pin makes the file."""
        return self._table_state(table_id, "lake_pins")

    def consumers_file(self, table_id: int) -> StateFile:
        """Return the file of a table's consumers and their positions; it may not exist yet."""
        return self._table_state(table_id, "consumers")

    def sidecar_file(self, table_id: int, name: str) -> StateFile:
        """Return the file of a door's state of a table; the first save makes the file."""
        return self._table_state(table_id, name)

    def row_ages_file(self, table_id: int) -> StateFile:
        """Return the file of a primary key table's row ages: offsets by time of writing."""
        return self._table_state(table_id, "row_ages")

    def transactions(self, table_id: int) -> Path:
        """Return the directory of a table's transactions."""
        return self.table(table_id) / "transactions"

    def bucket(self, table_id: int, bucket: int) -> Path:
        """Return the directory of one bucket's log."""
        return self.table(table_id) / f"bucket-{bucket}"

    def key_rows(self, table_id: int, bucket: int) -> Path:
        """Return the directory of one bucket's rows by key."""
        return self.bucket(table_id, bucket) / "kv"

    def dropped(self, table_id: int) -> Path:
        """Return the place of a dropped table's files until their deletion."""
        return self.tables / f"{table_id}{DROPPED_SUFFIX}"

    def given_up(self, table_id: int) -> Path:
        """Return the place of the files of a dropped damaged table, or of a replaced table."""
        return self.tables / f"{table_id}{GIVEN_UP_SUFFIX}"

    def close(self) -> None:
        """Unlock the directory; idempotent."""
        descriptor, self._lock_descriptor = self._lock_descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def lock(descriptor: int, operation: int) -> None:
    """Lock the file of a lock, exclusively or shared.

    Waits a moment for children of an owner that has died. Raises `BlockingIOError` while the
    directory has an owner.
    """
    deadline = time.monotonic() + _CHILDREN_END_S
    while True:
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except OSError:
            if _is_running(_owner_of(descriptor)) or time.monotonic() > deadline:
                raise
            time.sleep(_CHILDREN_LOOK_S)
        else:
            return


def _owner_of(descriptor: int) -> str:
    """Return the process id in the lock's file, empty without one."""
    return os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()


def _is_running(process: str) -> bool:
    """Whether a process still runs, as far as the system tells."""
    try:
        state = Path(f"/proc/{int(process)}/stat").read_text("ascii", "replace")
    except ValueError:
        return True
    except OSError:
        return not Path("/proc/self").exists()
    # The state follows the name in parentheses; a zombie has closed its files.
    return not state.rpartition(")")[2].lstrip().startswith("Z")


def _make_private(path: Path) -> None:
    """Make the directory, with every file inside, private to the owner."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & (stat.S_IRWXG | stat.S_IRWXO):
        return
    try:
        path.chmod(PRIVATE)
    except PermissionError:
        # Another user's directory, such as a mounted volume: only its owner can change the mode.
        _logger.warning(
            "event=data_directory_open path='%s' mode=%03o advice='chmod 700 it: others may read"
            " what is in it'",
            path,
            mode,
        )
    else:
        _logger.warning(
            "event=data_directory_closed path='%s' mode_before=%03o "
            " advice='readers that run as other users need a --warehouse outside of it'",
            path,
            mode,
        )
