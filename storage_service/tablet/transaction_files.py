"""What transactions of one table have on disk, all in one directory.

    <transaction id>.open         JSON: what the transaction is to do; it exists from begin on
    <transaction id>.<part>.part  a staged part (staged_part.py)
    <transaction id>.decision     JSON: what was decided; written by one atomic rename
    outcomes                      JSON: older decisions, folded into one file
    truncated                     JSON: where rows begin in each bucket since the last overwrite

Ids are made here, never taken from a request. A decision says `committing` until all its rows are
in the logs, then `committed` with their offsets; `skipped` wrote nothing. Everything is durable
when a method returns. Blocking, on any thread; one transaction is changed by one caller at a time.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from streamhouse.storage_service.errors import (
    CorruptDataError,
    StorageFailedError,
    UnknownOutcomeError,
)
from streamhouse.storage_service.log.filesystem import Filesystem, replace_durably
from streamhouse.storage_service.log.staged_part import StagedBatch, StagedPart, encode_part
from streamhouse.storage_service.model.transaction import (
    CommitResult,
    TransactionOperation,
)

__all__ = [
    "DECISION_SUFFIX",
    "OUTCOMES_FILE",
    "PART_SUFFIX",
    "Decision",
    "LoadedTransaction",
    "PartSize",
    "TransactionFiles",
    "TransactionSpec",
]

_logger = logging.getLogger(__name__)

_OPEN: Final = ".open"
PART_SUFFIX: Final = ".part"
DECISION_SUFFIX: Final = ".decision"
OUTCOMES_FILE: Final = "outcomes"
_TRUNCATED_FILE: Final = "truncated"
_JSON_BYTES_MAX: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionSpec:
    """What a transaction is to do, as it was begun."""

    transaction_id: str
    operation: TransactionOperation
    columns: tuple[str, ...] | None
    app_id: str | None
    version: int | None
    timeout_ms: int
    begun_us: int

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "transaction_id": self.transaction_id,
            "operation": str(self.operation),
            "columns": None if self.columns is None else list(self.columns),
            "app_id": self.app_id,
            "version": self.version,
            "timeout_ms": self.timeout_ms,
            "begun_us": self.begun_us,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TransactionSpec:
        """Read the JSON form."""
        columns = value["columns"]
        return cls(
            transaction_id=value["transaction_id"],
            operation=TransactionOperation(value["operation"]),
            columns=None if columns is None else tuple(columns),
            app_id=value["app_id"],
            version=value["version"],
            timeout_ms=value["timeout_ms"],
            begun_us=value["begun_us"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was decided about a transaction, and of what.

    `starts` are where its rows begin in each bucket they go to, known before any is written. An
    outcome does not list `parts` any more; `parts_digest` is theirs. With `is_truncating` the rows
    below `starts` are no rows of the table any more: so a log table is overwritten.
    """

    spec: TransactionSpec
    parts: tuple[str, ...]
    parts_digest: str
    starts: Mapping[int, int]
    result: CommitResult
    is_truncating: bool = False

    @property
    def truncated_offsets(self) -> Mapping[int, int]:
        """Where the rows of each bucket begin if it is committed; empty if that stays as it was."""
        return {b: start for b, start in self.starts.items() if start and self.is_truncating}

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "transaction": self.spec.to_json(),
            "parts": list(self.parts),
            "parts_digest": self.parts_digest,
            "starts": {str(b): start for b, start in self.starts.items()},
            "result": self.result.to_json(),
            "is_truncating": self.is_truncating,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Decision:
        """Read the JSON form."""
        return cls(
            spec=TransactionSpec.from_json(value["transaction"]),
            parts=tuple(value["parts"]),
            parts_digest=value["parts_digest"],
            starts={int(b): int(start) for b, start in value["starts"].items()},
            result=CommitResult.from_json(value["result"]),
            is_truncating=bool(value.get("is_truncating", False)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSize:
    """How much a staged part has."""

    row_count: int
    size_bytes: int


@dataclass(slots=True, kw_only=True)
class LoadedTransaction:
    """One transaction as it was left on disk."""

    spec: TransactionSpec
    parts: dict[str, PartSize] = field(default_factory=dict)
    decision: Decision | None = None


class TransactionFiles:
    """The directory `tables/<table id>/transactions`."""

    def __init__(self, directory: Path, *, table_id: int, filesystem: Filesystem) -> None:
        self.directory = directory
        self._table_id = table_id
        self._filesystem = filesystem
        self._is_made = False
        self._synced: set[str] = set()

    def begin(self, spec: TransactionSpec) -> None:
        """Store a new transaction; it survives a power failure once something is staged for it."""
        if not self._is_made:
            with _failing("begin a transaction in", self.directory):
                self._filesystem.make_directory(self.directory)
            self._is_made = True
        with _failing("begin a transaction in", self.directory):
            file = self._filesystem.create(self._open_file(spec.transaction_id))
            try:
                file.write([json.dumps(spec.to_json()).encode()], position=0)
            finally:
                file.close()

    def stage(
        self,
        transaction_id: str,
        part_id: str,
        schema: pa.Schema,
        batches: Sequence[StagedBatch],
    ) -> PartSize:
        """Store a part; a file that a crash cuts off is dropped at the next start."""
        path = self._part(transaction_id, part_id)
        buffers = encode_part(schema, batches, table_id=self._table_id)
        with _failing("stage rows in", self.directory):
            self._sync_open(transaction_id)
            file = self._filesystem.create(path)
            try:
                file.write(buffers, position=0)
                file.sync()
            except OSError:
                with contextlib.suppress(OSError):
                    self._filesystem.remove(path)
                raise
            finally:
                file.close()
            self._filesystem.sync_directory(self.directory)
        return PartSize(
            row_count=sum(batch.row_count for batch in batches),
            size_bytes=sum(map(len, buffers)),
        )

    def _sync_open(self, transaction_id: str) -> None:
        """Make durable what `begin` wrote; the directory is the caller's to sync."""
        if transaction_id in self._synced:
            return
        file = self._filesystem.open(self._open_file(transaction_id))
        try:
            file.sync()
        finally:
            file.close()
        self._synced.add(transaction_id)

    def open_part(self, transaction_id: str, part_id: str) -> StagedPart:
        """Open a staged part; raises CorruptDataError."""
        return StagedPart.open(
            self._part(transaction_id, part_id),
            filesystem=self._filesystem,
            table_id=self._table_id,
        )

    def decide(self, decision: Decision) -> None:
        """Write a decision, or replace it by its outcome.

        After a StorageFailedError it is not written. After an UnknownOutcomeError only a restart
        can tell.
        """
        name = f"{decision.spec.transaction_id}{DECISION_SUFFIX}"
        try:
            self._write_json(name, decision.to_json())
        except StorageFailedError as error:
            try:
                stored = self._read_json(name)
            except FileNotFoundError:
                raise error from None
            except (CorruptDataError, OSError):
                stored = None
            if stored is None or stored == json.loads(json.dumps(decision.to_json())):
                raise UnknownOutcomeError(
                    f"{error.message}; whether the transaction is decided shows after a restart"
                ) from error
            raise

    def fold(self, own: Iterable[Decision], remembered: Iterable[Decision]) -> None:
        """Write `remembered` into one file, then drop the files of `own`, all remembered there."""
        value = {"decisions": [decision.to_json() for decision in remembered]}
        self._write_json(OUTCOMES_FILE, value)
        self._remove(f"{d.spec.transaction_id}{DECISION_SUFFIX}" for d in own)

    def save_truncated(self, offsets: Mapping[int, int], timestamp_us: int) -> None:
        """Remember for good where an overwrite makes the rows of each bucket begin, and when."""
        value = {"offsets": {str(b): o for b, o in offsets.items()}, "timestamp_us": timestamp_us}
        self._write_json(_TRUNCATED_FILE, value)

    def load_truncated(self) -> tuple[dict[int, int], int]:
        """Return what `save_truncated` was given last."""
        if not (self.directory / _TRUNCATED_FILE).exists():
            return {}, 0
        value = self._read(_TRUNCATED_FILE)
        return {int(b): int(o) for b, o in value["offsets"].items()}, int(value["timestamp_us"])

    def drop_parts(self, transaction_id: str, parts: Iterable[str]) -> None:
        """Delete staged parts."""
        self._remove(self._part(transaction_id, part).name for part in parts)

    def drop(self, transaction_id: str, parts: Iterable[str]) -> None:
        """Delete what a transaction has on disk besides its decision."""
        self.drop_parts(transaction_id, parts)
        self._remove([self._open_file(transaction_id).name])
        self._synced.discard(transaction_id)

    def load(self) -> tuple[list[LoadedTransaction], list[Decision]]:
        """Return the transactions that have files of their own, and the folded decisions."""
        names = self._filesystem.list_names(self.directory)
        self._is_made = bool(names)
        found: dict[str, LoadedTransaction] = {}
        folded = []
        for name in names:
            if name == OUTCOMES_FILE:
                values = self._read(name)["decisions"]
                folded = [Decision.from_json(value) for value in values]
            elif name.endswith(DECISION_SUFFIX):
                decision = Decision.from_json(self._read(name))
                found[decision.spec.transaction_id] = LoadedTransaction(
                    spec=decision.spec, decision=decision
                )
        for name in names:
            if name.endswith(_OPEN) and name.removesuffix(_OPEN) not in found:
                spec = self._open_spec(name)
                if spec is not None:
                    found[spec.transaction_id] = LoadedTransaction(spec=spec)
        self._load_parts(names, found)
        return list(found.values()), folded

    def _open_spec(self, name: str) -> TransactionSpec | None:
        try:
            return TransactionSpec.from_json(self._read(name))
        except CorruptDataError as error:
            # Cut off by a crash before its begin was answered: nobody knows its id.
            _logger.warning("event=transaction_dropped file=%s why=%r", name, error.message)
            self._remove([name])
            return None

    def _load_parts(self, names: Iterable[str], found: Mapping[str, LoadedTransaction]) -> None:
        for name in names:
            if name.endswith(".tmp"):
                self._remove([name])
            if not name.endswith(PART_SUFFIX):
                continue
            transaction_id, part_id, _ = name.split(".")
            transaction = found.get(transaction_id)
            if transaction is None:
                self._remove([name])
                continue
            try:
                part = self.open_part(transaction_id, part_id)
            except CorruptDataError as error:
                if transaction.decision is None:
                    _logger.warning("event=part_dropped file=%s why=%r", name, error.message)
                    self._remove([name])
                    continue
                raise
            size = PartSize(row_count=part.row_count, size_bytes=part.size_bytes)
            transaction.parts[part_id] = size

    def _open_file(self, transaction_id: str) -> Path:
        return self.directory / f"{transaction_id}{_OPEN}"

    def _part(self, transaction_id: str, part_id: str) -> Path:
        return self.directory / f"{transaction_id}.{part_id}{PART_SUFFIX}"

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        path = self.directory / name
        with _failing("write to", path):
            replace_durably(self._filesystem, path, [json.dumps(value).encode()])
            self._filesystem.sync_directory(self.directory)

    def _read_json(self, name: str) -> Any:
        data = self._filesystem.read(self.directory / name, bytes_max=_JSON_BYTES_MAX)
        try:
            return json.loads(data)
        except ValueError as error:
            raise CorruptDataError(f"{self.directory / name} is unreadable: {error}") from error

    def _read(self, name: str) -> dict[str, Any]:
        try:
            value = self._read_json(name)
        except OSError as error:
            raise CorruptDataError(f"{self.directory / name} is unreadable: {error}") from error
        if not isinstance(value, dict):
            raise CorruptDataError(f"{self.directory / name} holds no JSON object")
        return value

    def _remove(self, names: Iterable[str]) -> None:
        """Delete files; those that cannot be deleted are found again at the next start."""
        for name in names:
            with contextlib.suppress(OSError):
                self._filesystem.remove(self.directory / name)


@contextlib.contextmanager
def _failing(what: str, where: Path) -> Any:
    try:
        yield
    except OSError as error:
        raise StorageFailedError(
            f"cannot {what} {where.name}: {error.strerror or error}; nothing was stored"
        ) from error
