"""A data directory whose files change through a journal, without an engine: for tests of restore.

Only what tests need: buckets with logs, state files and marks, tables that are moved and dropped.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streamhouse.storage_service.log.filesystem import (
    LocalFilesystem,
    WritableFile,
    replace_durably,
)
from streamhouse.storage_service.ownership.journal._journaled_filesystem import JournaledFilesystem
from streamhouse.storage_service.ownership.journal._writer import JournalWriter, WriterOptions
from streamhouse.storage_service.ownership.journal.checkpoints._checkpoint import CheckpointTaker
from streamhouse.storage_service.ownership.journal.checkpoints._job import CheckpointJob
from streamhouse.storage_service.ownership.journal.checkpoints._recorder import TreeRecorder
from streamhouse.storage_service.ownership.journal.checkpoints._trim import Trimmer
from streamhouse.storage_service.ownership.journal.checkpoints.key_files import KeyCopy, KeyPacker
from streamhouse.storage_service.ownership.journal.epochs import Tenure, newest_epoch, take
from streamhouse.storage_service.ownership.journal.names import ShardNames
from streamhouse.storage_service.ownership.journal.operations import is_journalled
from streamhouse.storage_service.ownership.journal.restore._start import Begun, JournalStart
from streamhouse.storage_service.ownership.journal.steps import do, run
from streamhouse.storage_service.ownership.journal.store.object_store import ObjectStore

NAMES = ShardNames()


def take_epoch(store: ObjectStore, nonce: bytes) -> Tenure:
    """Take the next epoch."""
    newest = run(newest_epoch(NAMES), lambda step: do(store, step))
    return run(
        take(NAMES, after=newest, endpoint="http://here", lease_ms=1_000, nonce=nonce),
        lambda step: do(store, step),
    )


@dataclass
class Owner:
    """A process that owns a directory and its journal, from its start to `stop` or `die`."""

    directory: Path
    store: ObjectStore
    seed: int = 0
    keys: Sequence[KeyCopy] = ()
    in_flight_max: int = 3
    logs: dict[str, WritableFile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.rng = random.Random(self.seed)
        self.nonce = self.rng.randbytes(16)
        start = JournalStart(self.directory, self.store)
        start.prepare(self.nonce)
        self.tenure = take_epoch(self.store, self.nonce)
        service_id = self.tenure.facts.service_id
        self.begun: Begun = start.begin(epoch=self.tenure.epoch, service_id=service_id)
        self.writer = JournalWriter(
            self.store,
            self.tenure,
            on_fenced=lambda why: None,
            options=WriterOptions(linger_ms=0.5, in_flight_max=self.in_flight_max),
        )
        self.recorder = TreeRecorder(self.writer, self.begun.tree)
        self.filesystem = JournaledFilesystem(
            LocalFilesystem(),
            self.directory,
            self.recorder,
            log_bytes=self.recorder.log_bytes(),
            on_failure=lambda why: None,
        )
        manifest = self.begun.manifest
        self.taker = CheckpointTaker(
            directory=self.directory,
            store=self.store,
            names=NAMES,
            service_id=service_id,
            epoch=self.tenure.epoch,
            recorded=self.recorder,
            copy_keys=lambda staging, known: self.keys,
            packs=dict(manifest.packs) if manifest else {},
            previous_place=manifest.place if manifest else None,
            sleep=lambda _: None,
            keys=KeyPacker(manifest.key_rows if manifest else ()),
        )
        self.job = CheckpointJob(
            self.taker, Trimmer(self.store, NAMES), self.writer, first_manifest=manifest
        )
        start.finish(epoch=self.tenure.epoch, service_id=service_id)

    def append(self, path: str, data: bytes) -> None:
        """Append to a log, durably here."""
        file = self.logs.get(path)
        if file is None:
            file = self.logs[path] = self.filesystem.open(self.directory / path)
        file.write([data], position=self.filesystem.size_bytes(self.directory / path))
        file.sync()

    def journal_tails(self) -> None:
        """Journal what the logs have beyond the journal, as the engine does when it opens them."""
        for path in self.recorder.log_bytes():
            file = self.logs[path] = self.filesystem.open(self.directory / path)
            file.sync()

    def replace(self, path: str, data: bytes) -> None:
        """Give a file these contents."""
        self._close(path)
        replace_durably(self.filesystem, self.directory / path, [data])

    def remove(self, path: str) -> None:
        """Remove a file."""
        self._close(path)
        self.filesystem.remove(self.directory / path)

    def _close(self, path: str) -> None:
        file = self.logs.pop(path, None)
        if file is not None:
            file.close()

    def forget(self, directory: str) -> None:
        """Close what is open below a directory."""
        for path in [path for path in self.logs if path.startswith(directory + "/")]:
            self.logs.pop(path).close()

    def step(self) -> None:
        """Do something that a service could do."""
        found = files(self.directory)
        logs = [path for path in found if path.endswith(".log") and ".dropped/" not in path]
        rng = self.rng
        kind = rng.choice(
            ["append"] * 8 + ["state"] * 3 + ["log", "log", "remove", "mark", "table"]
        )
        bucket = f"tables/{rng.randrange(1, 4)}/bucket-{rng.randrange(2)}"
        if kind == "append" and logs:
            self.append(rng.choice(logs), rng.randbytes(rng.randrange(1, 300)))
        elif kind == "remove" and found:
            self.remove(rng.choice(sorted(found)))
        elif kind == "table" and not rng.randrange(3):
            source, target = bucket.rpartition("/")[0], f"{bucket.rpartition('/')[0]}.dropped"
            if (self.directory / target).exists():
                self.filesystem.remove_tree(self.directory / target)
            elif (self.directory / source).exists():
                self.forget(source)
                self.filesystem.move_directory(self.directory / source, self.directory / target)
        else:
            self.filesystem.make_directory(self.directory / bucket)
            name = {
                "log": f"{rng.randrange(3) * 1000:020d}.log",
                "mark": "durable.mark",
            }.get(kind, rng.choice([f"{0:020d}.index", f"{0:020d}.writers"]))
            if kind == "state" and rng.randrange(2):
                bucket, name = bucket.rpartition("/")[0], rng.choice(["table.json", "lake.json"])
            self.replace(f"{bucket}/{name}", rng.randbytes(rng.randrange(200)))

    def checkpoint(self) -> bool:
        """Take a checkpoint, trim, and roll."""
        return self.job.take()

    def wait_stored(self) -> None:
        """Return once everything is stored."""
        self.writer.wait_stored(self.writer.recorded_position)

    def die(self) -> None:
        """End as if killed."""
        self.writer.abandon()
        self.forget("tables")

    def stop(self) -> None:
        """End cleanly."""
        assert self.writer.stop(timeout_s=60)
        self.forget("tables")


def files(directory: Path) -> dict[str, bytes]:
    """Return the journalled files of a directory."""
    return {
        name: path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if is_journalled(name := path.relative_to(directory).as_posix())
    }
