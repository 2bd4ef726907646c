"""A shard owned by this process: its recorded changes, its lease, and its end.

Order: the lease is renewed from the moment the epoch is taken, as a sign of life for watchers; the
directory records from the moment it is opened; the seal comes after all other objects, when
requests are no longer answered. Blocking.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeAlias

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.threads import NamedThread
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.replica import Replication
from streamhouse.storage_service.ownership.journal._journaled_filesystem import JournaledFilesystem
from streamhouse.storage_service.ownership.journal._writer import JournalWriter, WriterOptions
from streamhouse.storage_service.ownership.journal.checkpoints._checkpoint import CheckpointTaker
from streamhouse.storage_service.ownership.journal.checkpoints._job import CheckpointJob
from streamhouse.storage_service.ownership.journal.checkpoints._recorder import TreeRecorder
from streamhouse.storage_service.ownership.journal.checkpoints._trim import Trimmer
from streamhouse.storage_service.ownership.journal.checkpoints.key_files import KeyCopy, KeyPacker
from streamhouse.storage_service.ownership.journal.epochs import Tenure
from streamhouse.storage_service.ownership.journal.lease import LeaseKeeper
from streamhouse.storage_service.ownership.journal.restore._start import Begun
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectStore,
    ObjectStoreError,
)
from streamhouse.storage_service.ownership.roles.boot_clock import boot_clock_s
from streamhouse.storage_service.ownership.roles.ending import (
    FENCED_EXIT_CODE,
    JOURNAL_FAILED_EXIT_CODE,
    end_at_once,
)
from streamhouse.storage_service.ownership.roles.role import Standing

__all__ = ["OwnedShard"]

_logger = logging.getLogger(__name__)

CopyKeys: TypeAlias = Callable[[Path, Mapping[str, int]], list[KeyCopy]]

_CHECKPOINT_LOOK_S: Final = 1.0


class OwnedShard:
    """See the module. `check` implements `http_exchange.Tenure.check`."""

    def __init__(
        self,
        config: ServiceConfig,
        store: ObjectStore,
        tenure: Tenure,
        *,
        lease_store: ObjectStore,
        opened_s: float,
        endpoint: str,
        standing: Standing,
    ) -> None:
        """Start writing the taken epoch and renewing its lease.

        `opened_s` is a time before the epoch was opened; `lease_store` is the same store with a
        short timeout.
        """
        self.service_id: Final = tenure.facts.service_id
        self.epoch: Final = tenure.epoch
        self._config = config
        self._store = store
        self._names = tenure.names
        self._standing = standing
        self._checkpoints: CheckpointThread | None = None
        self._writer = JournalWriter(
            store,
            tenure,
            on_fenced=_fenced,
            options=WriterOptions(
                linger_ms=config.journal_linger_ms, lag_ms_max=config.journal_lag_max_ms
            ),
            put_took=standing.journal.put_took,
        )
        self._lease = LeaseKeeper(
            lease_store,
            tenure.names,
            epoch=lambda: self._writer.epoch,
            is_opening=lambda: self._writer.is_opening,
            opened_s=opened_s,
            on_lapse=lambda: self._writer.roll(is_empty_left=True),
            endpoint=endpoint,
            lease_ms=config.lease_ms,
            clock=boot_clock_s,
        )
        self._lease.start()
        standing.journal.writer = self._writer
        standing.journal.lease_left_ms = lambda: self._lease.valid_ms

    @property
    def valid_until_s(self) -> float:
        """The time of the boot clock up to which the lease holds, if nothing renews it."""
        return self._lease.valid_until_s

    def check(self) -> None:
        """Raise `NotOwnerError` unless the lease still holds."""
        if not self._lease.is_valid:
            raise self._standing.not_owner()

    def check_write(self) -> None:
        """Raise `NotOwnerError` after the lease expired, if writes do not wait for the journal.

        Otherwise a paused process would acknowledge rows present on its own disk alone, until the
        process meets its successor's seal.
        """
        if self._config.journal_ack != "journal":
            self.check()

    def record(self, directory: DataDirectory, begun: Begun) -> Replication:
        """Record the directory's changes from now on; `begun` is its current state."""
        if begun.first_operation is not None:
            self._writer.record(begun.first_operation)
        self._begun = begun
        self._recorder = TreeRecorder(self._writer, begun.tree)
        directory.filesystem = JournaledFilesystem(
            LocalFilesystem(),
            directory.path,
            self._recorder,
            log_bytes=self._recorder.log_bytes(),
            on_failure=_failed,
        )
        return Replication(
            replica=self._recorder,
            is_waited_for=self._config.journal_ack == "journal",
            lag_ms_max=self._config.journal_lag_max_ms,
        )

    def begin_checkpoints(self, directory: DataDirectory, copy_keys: CopyKeys) -> None:
        """Take checkpoints from now on, the first at once after an upload."""
        manifest = self._begun.manifest
        taker = CheckpointTaker(
            directory=directory.path,
            store=self._store,
            names=self._names,
            service_id=self.service_id,
            epoch=self.epoch,
            recorded=self._recorder,
            copy_keys=copy_keys,
            packs=dict(manifest.packs) if manifest else {},
            previous_place=manifest.place if manifest else None,
            keys=KeyPacker(manifest.key_rows if manifest else ()),
        )
        trimmer = Trimmer(self._store, self._names)
        job = CheckpointJob(taker, trimmer, self._writer, first_manifest=manifest)
        if self._begun.is_upload:
            job.take()
        self._checkpoints = CheckpointThread(job)
        self._standing.journal.checkpoint_age_s = lambda: job.age_s
        self._standing.journal.damaged_files = lambda: sorted(taker.damaged)

    def close(self, *, timeout_s: float) -> bool:
        """Store everything and seal the epoch for the next owner; False without a seal."""
        if self._checkpoints is not None:
            self._checkpoints.stop()
        is_sealed = self._writer.stop(timeout_s=timeout_s)
        self._lease.close()
        return is_sealed


class CheckpointThread:
    """Takes due checkpoints; after a failure the next attempt follows.

    The process ends without waiting for a running checkpoint: its packs stay unused, and are
    trimmed.
    """

    def __init__(self, job: CheckpointJob) -> None:
        self._job = job
        self._is_over = threading.Event()
        NamedThread("journal-checkpoint", self._run).start()

    def stop(self) -> None:
        """Start no further checkpoint."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(_CHECKPOINT_LOOK_S):
            try:
                self._job.look()
            except (ObjectStoreError, StreamhouseError, OSError) as error:
                if not self._is_over.is_set():
                    _logger.warning("event=checkpoint_failed why=%r", str(error))
            except Exception:  # the outermost loop of a thread: the next one may succeed
                if not self._is_over.is_set():
                    _logger.exception("event=bug thread=journal-checkpoint")


def _fenced(why: str) -> None:
    end_at_once("fenced", why, exit_code=FENCED_EXIT_CODE)


def _failed(why: str) -> None:
    end_at_once("journal_not_followed", why, exit_code=JOURNAL_FAILED_EXIT_CODE)
