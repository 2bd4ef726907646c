"""The engine over a journal, from the taking of an epoch to its end, in this process."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from streamhouse.core.errors import StreamhouseError
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.engine.keys.key_recovery import KeyRecovery
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.log.filesystem import Buffer, LocalFilesystem
from streamhouse.storage_service.log.log_tablet import LogTablet
from streamhouse.storage_service.log.replica import Replication
from streamhouse.storage_service.log.segments.segment import StoredBatch
from streamhouse.storage_service.ownership.journal._journaled_filesystem import JournaledFilesystem
from streamhouse.storage_service.ownership.journal._writer import JournalWriter, WriterOptions
from streamhouse.storage_service.ownership.journal.checkpoints._checkpoint import CheckpointTaker
from streamhouse.storage_service.ownership.journal.checkpoints._job import CheckpointJob
from streamhouse.storage_service.ownership.journal.checkpoints._recorder import TreeRecorder
from streamhouse.storage_service.ownership.journal.checkpoints._trim import Trimmer
from streamhouse.storage_service.ownership.journal.checkpoints.key_files import KeyPacker
from streamhouse.storage_service.ownership.journal.restore._start import Begun, JournalStart
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectStore,
    StoreUnavailableError,
)
from streamhouse.storage_service.server.status.metrics import ServiceMetrics
from tests.support.in_process_service import EVENTS
from tests.support.kv_world import looked_up
from tests.support.restore_world import NAMES, take_epoch

__all__ = ["Gate", "JournalledEngine", "journalled_engine", "logged_ids", "names_by_id"]


class Gate:
    """A store whose journal takes nothing more once it is shut; other objects go on."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self.is_shut = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create(self, key: str, buffers: Sequence[Buffer]) -> None:
        """See `ObjectStore.create`."""
        if self.is_shut and "/journal/" in key:
            raise StoreUnavailableError("it is away")
        self._inner.create(key, buffers)


@dataclass
class JournalledEngine:
    """An engine that owns its directory and its journal."""

    manager: TabletManager
    writer: JournalWriter
    job: CheckpointJob
    begun: Begun

    async def checkpoint(self) -> bool:
        """Take a checkpoint, trim, and roll."""
        return await self.manager.runtime.run(self.job.take)

    async def wait_stored(self) -> None:
        """Return once all that was recorded is stored."""
        position = self.writer.recorded_position
        await self.manager.runtime.run(self.writer.wait_stored, position)


@contextlib.asynccontextmanager
async def journalled_engine(
    data_dir: Path,
    store: ObjectStore,
    *,
    is_waited_for: bool = True,
    recovery: KeyRecovery | None = None,
    on_begun: Callable[[], None] = lambda: None,
    **config: Any,
) -> AsyncIterator[JournalledEngine]:
    """Take the next epoch and open the tables; leaving ends as if killed."""
    directory = DataDirectory.open(data_dir)
    try:
        start = JournalStart(directory.path, store)
        nonce = secrets.token_bytes(16)
        start.prepare(nonce)
        tenure = take_epoch(store, nonce)
        service_id = tenure.facts.service_id
        begun = start.begin(epoch=tenure.epoch, service_id=service_id)
        on_begun()
    except BaseException:
        directory.close()
        raise
    writer = JournalWriter(
        store, tenure, on_fenced=lambda why: None, options=WriterOptions(linger_ms=0.5)
    )
    if begun.first_operation is not None:
        writer.record(begun.first_operation)
    recorder = TreeRecorder(writer, begun.tree)
    directory.filesystem = JournaledFilesystem(
        LocalFilesystem(),
        directory.path,
        recorder,
        log_bytes=recorder.log_bytes(),
        on_failure=lambda why: None,
    )
    with ThreadPoolExecutor(3) as executor:
        manager = await TabletManager.open(
            ServiceConfig(data_dir=data_dir, **config),
            runtime=Runtime(executor=executor, observer=ServiceMetrics()),
            recovery=recovery,
            directory=directory,
            replication=Replication(
                replica=recorder, is_waited_for=is_waited_for, lag_ms_max=10**9
            ),
        )
        taker = CheckpointTaker(
            directory=directory.path,
            store=store,
            names=NAMES,
            service_id=service_id,
            epoch=tenure.epoch,
            recorded=recorder,
            copy_keys=manager.copy_keys,
            packs=dict(begun.manifest.packs) if begun.manifest else {},
            keys=KeyPacker(begun.manifest.key_rows if begun.manifest else ()),
        )
        job = CheckpointJob(taker, Trimmer(store, NAMES), writer, first_manifest=begun.manifest)
        engine = JournalledEngine(manager, writer, job, begun)
        if begun.is_upload:
            await engine.checkpoint()
        start.finish(epoch=tenure.epoch, service_id=service_id)
        try:
            yield engine
        finally:
            writer.abandon()
            with contextlib.suppress(StreamhouseError):
                await manager.close()


def logged_ids(table: OpenTable) -> list[list[int]]:
    """Return the ids in the logs of a table of `EVENTS`, bucket by bucket."""
    return [
        [
            number
            for stored in _stored(tablet)
            for number in pa.ipc.read_record_batch(pa.py_buffer(stored.payload), EVENTS)
            .column("id")
            .to_pylist()
        ]
        for tablet in table.tablets
    ]


def _stored(tablet: LogTablet) -> list[StoredBatch]:
    if tablet.high_watermark == tablet.log_start_offset:
        return []
    return tablet.read(tablet.log_start_offset, bytes_max=1 << 40)


def names_by_id(table: OpenTable) -> dict[int, str]:
    """Return the rows by key of the ids below 100, of all buckets."""
    keys = pa.record_batch([pa.array(range(100), pa.int64())], names=["id"])
    found: dict[int, str] = {}
    for bucket in table.key_buckets:
        rows = looked_up(bucket.rows, keys).rows
        found.update(
            zip(rows.column("id").to_pylist(), rows.column("name").to_pylist(), strict=True)
        )
    return found
