"""The steps by which a process comes to own a shard: take, then read (decision 0020).

These processes may try to take a shard: any process if the shard was never owned, or its owner
sealed the last epoch; the process whose directory served the shard last, because its directory's
lock proves the previous process dead (a copy of the directory proves nothing); and any process once
the owner's lease was unchanged for its lease time. The journal alone decides who owns the shard.
Blocking; one thread at a time.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from streamhouse.core.errors import StreamhouseError, UnavailableError
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.ownership.journal._asked_store import PatientStore, StoppableStore
from streamhouse.storage_service.ownership.journal.epochs import SealReason, find_seal, take
from streamhouse.storage_service.ownership.journal.lease import (
    LeaseWatch,
    SeenLease,
    renewal_timeout_s,
)
from streamhouse.storage_service.ownership.journal.names import ShardNames
from streamhouse.storage_service.ownership.journal.object_format import NONCE_BYTES
from streamhouse.storage_service.ownership.journal.restore._start import Begun, JournalStart
from streamhouse.storage_service.ownership.journal.steps import Steps, run_on
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectStore,
    ObjectStoreError,
)
from streamhouse.storage_service.ownership.journal.store.store_opening import (
    open_store,
    probe,
    refuse_within,
)
from streamhouse.storage_service.ownership.roles._owned_shard import OwnedShard
from streamhouse.storage_service.ownership.roles.boot_clock import boot_clock_s
from streamhouse.storage_service.ownership.roles.role import Standing
from streamhouse.storage_service.ownership.shards.chain import DirectoryObjects
from streamhouse.storage_service.ownership.shards.directory import known_service_id

__all__ = ["ShardStart"]

_logger = logging.getLogger(__name__)

_STORE_PROPERTIES: Final = "s3."

_T = TypeVar("_T")


class ShardStart:
    """See the module. `stop` ends waits for an unavailable store.

    Long reads retry each object; `look` raises store errors.
    """

    def __init__(
        self,
        config: ServiceConfig,
        directory: DataDirectory,
        *,
        endpoint: str,
        standing: Standing,
        stop: threading.Event,
        open_journal: Callable[[ServiceConfig], ObjectStore] | None = None,
    ) -> None:
        self._config = config
        self._directory: Final = directory.path
        self._endpoint = config.advertised_endpoint or endpoint
        self._standing = standing
        self.names: Final = ShardNames(config.shard)
        self.store: Final = (open_journal or _opened_journal)(config)
        self._lease_store = (open_journal or _opened_for_lease)(config)
        self.reading: Final = StoppableStore(self.store, stop)
        """The same store, for the many requests of a start."""
        self._patient = PatientStore(
            self.reading, pause=lambda s: not stop.wait(s), failed=_note_failure
        )
        self._watch = LeaseWatch(lease_ms=config.lease_ms, clock=boot_clock_s)
        self._begun_s = boot_clock_s()
        self._start = JournalStart(directory.path, self._patient, self.names, place=directory.place)
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    @property
    def newest_epoch(self) -> int:
        """The newest epoch seen; 0 if the shard was never owned."""
        return self._watch.epoch

    @property
    def was_last(self) -> bool:
        """Whether the newest epoch seen was this directory's. Asks the store."""
        return self._watch.epoch > 0 and self._start.was_last(self._watch.epoch)

    @property
    def was_last_here(self) -> bool:
        """As `was_last`, and the process of this epoch is dead. Asks the store."""
        return self._watch.epoch > 0 and self._start.was_last_here(self._watch.epoch)

    @property
    def has_run_out(self) -> bool:
        """Whether no owner renewed a lease for a lease time."""
        if self._watch.epoch == 0:
            return boot_clock_s() - self._begun_s > self._config.lease_ms / 1_000
        return self._watch.has_run_out

    @property
    def sign_of_life(self) -> tuple[int, SeenLease | None]:
        """A value changed by every renewal of the owner."""
        return self._watch.epoch, self._watch.lease

    def look(self) -> None:
        """Read the shard's owner. Raises store errors."""
        self._watch.look(self.store, self.names)
        lease = self._watch.lease
        self._standing.owner = None if lease is None else lease.owner
        if self._standing.service_id is None:
            # A later step of the start reports errors of the directory.
            with contextlib.suppress(StreamhouseError):
                self._standing.service_id = known_service_id(DirectoryObjects(self.store))

    def note_whose_it_was(self) -> None:
        """Log why a directory with the last epoch is not served at once."""
        if self.was_last and not self.was_last_here:
            _logger.warning(
                "event=lease_waited_for shard=%s why='%s was copied, or is in another machine, or"
                " the machine has restarted: its last process may be alive elsewhere'",
                self.names.shard,
                self._directory,
            )

    def may_take_now(self) -> bool:
        """Whether the shard can be taken without waiting."""
        epoch = self._watch.epoch
        if epoch == 0 or self._start.was_last_here(epoch):
            return True
        seal = self._do(find_seal(self.names, epoch))
        # A rolling owner goes on in the next epoch.
        return seal is not None and seal.reason != SealReason.ROLLED

    def owned_elsewhere(self) -> UnavailableError:
        """Return the error of a non-standby process refused by a live owner."""
        owner = self._standing.owner
        return UnavailableError(
            f"shard '{self.names.shard}' of {self.store.url} is owned by"
            f" {'a process' if owner is None else f'the service at {owner}'}, which is alive: stop"
            " it first, or start with --standby to take over when it is gone"
        )

    def disown(self) -> None:
        """Note a live owner: this directory is a copy of the owner's."""
        self._start.disown()

    def prepare(self) -> None:
        """Note in the directory: this process may take the shard."""
        self._start.prepare(self._nonce)

    def take(self, *, after: int) -> OwnedShard:
        """Become the owner of the epoch after `after`, known as ended or expired.

        Raises `TakenByOtherError` if another process was faster: a newer owner is never fenced.
        """
        opened_s = boot_clock_s()
        tenure = self._do(
            take(
                self.names,
                after=after,
                endpoint=self._endpoint,
                lease_ms=self._config.lease_ms,
                nonce=self._nonce,
            )
        )
        _logger.info("event=taken shard=%s epoch=%d", self.names.shard, tenure.epoch)
        return OwnedShard(
            self._config,
            self.store,
            tenure,
            lease_store=self._lease_store,
            opened_s=opened_s,
            endpoint=self._endpoint,
            standing=self._standing,
        )

    def begin(self, *, epoch: int, service_id: str) -> Begun:
        """Restore the directory from the journal before `epoch`, which is open."""
        return self._start.begin(epoch=epoch, service_id=service_id)

    def finish(self, shard: OwnedShard) -> None:
        """Note the directory as restored and served from now on."""
        self._start.finish(epoch=shard.epoch, service_id=shard.service_id)

    def _do(self, steps: Steps[_T]) -> _T:
        return run_on(self._patient, steps)


def _note_failure(error: ObjectStoreError) -> None:
    _logger.warning("event=journal_store_failed error='%s'", error)


def _opened_journal(config: ServiceConfig) -> ObjectStore:
    """Open and probe the store; raises `InvalidRequestError` for an unusable store."""
    assert config.journal_url is not None
    refuse_within(config.journal_url, config.data_dir)
    store = _store(config)
    probe(store)
    return store


def _opened_for_lease(config: ServiceConfig) -> ObjectStore:
    """Open the store for renewals alone: a hanging connection must not cost the lease."""
    return _store(config, timeout_s=renewal_timeout_s(config.lease_ms))


def _store(config: ServiceConfig, *, timeout_s: float | None = None) -> ObjectStore:
    assert config.journal_url is not None
    properties = {
        key: value
        for key, value in config.catalog_properties.items()
        if key.startswith(_STORE_PROPERTIES)
    }
    return open_store(config.journal_url, properties=properties, timeout_s=timeout_s)
