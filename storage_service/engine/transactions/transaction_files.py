"""What transactions of one table have on disk, all in one directory.

    <transaction id>.open         JSON: what the transaction is to do; it exists from begin on
    <transaction id>.<part>.part  a staged part (staged_part.py)
    <transaction id>.decision     JSON: what was decided; written by one atomic rename
    outcomes                      JSON: older decisions, folded into one file
    truncated                     JSON: where rows begin in each bucket since the last overwrite

Ids are made here, never taken from a request. A decision says `committing` until all its rows are
in the logs, then `committed` with their offsets; `skipped` wrote nothing. Everything is durable
when a method returns. Blocking, on any thread; one transaction is changed by one caller at a time.

All JSON is sealed (state_file.py). `outcomes` and `truncated` are there from the table's creation
on. Decisions are numbered without a gap, and `outcomes` says up to which number they are folded, so
a decision that is missing is noticed. It also has what `truncated` said then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from streamhouse.core.errors import (
    CorruptDataError,
    StorageFailedError,
    UnknownOutcomeError,
)
from streamhouse.core.model.offsets import buckets_to_json, offsets_from_json
from streamhouse.core.model.transaction import (
    CommitResult,
    LinkedCommit,
    TransactionOperation,
)
from streamhouse.storage_service.directory.data_directory import DECISION_SUFFIX
from streamhouse.storage_service.directory.state_file import (
    StateIdentity,
    is_of_another_format,
    seal,
    unseal,
)
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.filesystem import Filesystem, replace_durably
from streamhouse.storage_service.log.staged_part import StagedPart, encode_part

__all__ = [
    "OPEN_SUFFIX",
    "OUTCOMES_FILE",
    "PART_SUFFIX",
    "TRUNCATED_FILE",
    "Decision",
    "LoadedTransaction",
    "PartSize",
    "TransactionFiles",
    "TransactionSpec",
    "next_decision_number",
]

_logger = logging.getLogger(__name__)

OPEN_SUFFIX: Final = ".open"
PART_SUFFIX: Final = ".part"
OUTCOMES_FILE: Final = "outcomes"
TRUNCATED_FILE: Final = "truncated"
_OPEN_KIND: Final = "transaction"
_DECISION_KIND: Final = "decision"
_OUTCOMES_KIND: Final = "outcomes"
_TRUNCATED_KIND: Final = "truncated"
_JSON_BYTES_MAX: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionSpec:
    """The specification of a transaction, from its begin.

    `source` numbers the versions of `app_id`, and `run` is the life of the source that gave the
    number; None if the caller named none.
    """

    transaction_id: str
    operation: TransactionOperation
    columns: tuple[str, ...] | None
    app_id: str | None
    version: int | None
    timeout_ms: int
    begun_us: int
    source: str | None = None
    run: str | None = None

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
            **({} if self.source is None else {"source": self.source}),
            **({} if self.run is None else {"run": self.run}),
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
            source=value.get("source"),
            run=value.get("run"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision about a transaction.

    `starts` are the first offsets of the rows in each written bucket, known before the first write.
    An outcome has `parts_digest` instead of `parts`. With `is_truncating` the rows below `starts`
    leave the table: the overwrite of a log table. `number` counts the table's decisions, from 1.
    `linked` transactions are committed before the outcome is written.
    """

    spec: TransactionSpec
    parts: tuple[str, ...]
    parts_digest: str
    starts: Mapping[int, int]
    result: CommitResult
    is_truncating: bool = False
    number: int = 0
    linked: LinkedCommit | None = None

    @property
    def truncated_offsets(self) -> Mapping[int, int]:
        """The first offset of each bucket's rows after the commit; empty without an overwrite."""
        return {b: start for b, start in self.starts.items() if start and self.is_truncating}

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        linked = {} if self.linked is None else {"linked": self.linked.to_json()}
        return linked | {
            "transaction": self.spec.to_json(),
            "parts": list(self.parts),
            "parts_digest": self.parts_digest,
            "starts": buckets_to_json(self.starts),
            "result": self.result.to_json(),
            "is_truncating": self.is_truncating,
            "number": self.number,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Decision:
        """Read the JSON form."""
        return cls(
            spec=TransactionSpec.from_json(value["transaction"]),
            parts=tuple(value["parts"]),
            parts_digest=value["parts_digest"],
            starts=offsets_from_json(value["starts"]),
            result=CommitResult.from_json(value["result"]),
            is_truncating=bool(value.get("is_truncating", False)),
            number=int(value.get("number", 0)),
            linked=LinkedCommit.from_json(value["linked"]) if "linked" in value else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSize:
    """The rows and bytes of a staged part."""

    row_count: int
    size_bytes: int


@dataclass(slots=True, kw_only=True)
class LoadedTransaction:
    """A transaction as found on disk."""

    spec: TransactionSpec
    parts: dict[str, PartSize] = field(default_factory=dict)
    decision: Decision | None = None


class TransactionFiles:
    """The directory `tables/<table id>/transactions`."""

    def __init__(
        self,
        directory: Path,
        *,
        service_id: str,
        table_id: int,
        filesystem: Filesystem,
        is_former: bool = False,
    ) -> None:
        self.directory = directory
        self._service_id = service_id
        self.table_id = table_id
        self._filesystem = filesystem
        self.is_former = is_former
        self._synced: set[str] = set()
        self._folded = 0
        self._truncated: tuple[dict[int, int], int] = ({}, 0)
        self.next_number = 1
        """The number of the next decision."""

    def create(self, truncated: Mapping[int, int], timestamp_us: int) -> None:
        """Make the files of every table, for a table with rows from `truncated` on."""
        with _failing("make", self.directory):
            self._filesystem.make_directory(self.directory)
        self._truncated = (dict(truncated), timestamp_us)
        value = _truncated_to_json(truncated, timestamp_us)
        # One sync makes both names durable.
        self._replace(TRUNCATED_FILE, _TRUNCATED_KIND, value)
        self._write_outcomes((), 0)

    def upgrade(
        self, folded: Sequence[Decision], truncated: Mapping[int, int], timestamp_us: int
    ) -> None:
        """Make the files of every table from an earlier release's files, as found by `load`."""
        self.save_truncated(truncated, timestamp_us)
        self._write_outcomes(folded, self._folded)

    def begin(self, spec: TransactionSpec) -> None:
        """Store a new transaction; the first staged part makes the transaction durable."""
        with _failing("begin a transaction in", self.directory):
            sealed = seal(self._identity(_OPEN_KIND), spec.to_json())
            path = self._open_file(spec.transaction_id)
            replace_durably(self._filesystem, path, [sealed], is_synced=False)

    def stage(
        self,
        transaction_id: str,
        part_id: str,
        schema: pa.Schema,
        batches: Sequence[RoutedBatch],
    ) -> PartSize:
        """Store a part."""
        path = self._part(transaction_id, part_id)
        buffers = encode_part(schema, batches, table_id=self.table_id)
        with _failing("stage rows in", self.directory):
            self._sync_open(transaction_id)
            replace_durably(self._filesystem, path, buffers)
            self._filesystem.sync_directory(self.directory)
        return PartSize(
            row_count=sum(batch.row_count for batch in batches),
            size_bytes=sum(map(len, buffers)),
        )

    def _sync_open(self, transaction_id: str) -> None:
        """Make the file of `begin` durable; the caller syncs the directory."""
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
            table_id=self.table_id,
        )

    def decide(self, decision: Decision) -> None:
        """Write a decision, or replace the decision by its outcome.

        After a StorageFailedError nothing was written. After an UnknownOutcomeError only a restart
        can tell.
        """
        name = f"{decision.spec.transaction_id}{DECISION_SUFFIX}"
        try:
            self._write_json(name, _DECISION_KIND, decision.to_json())
        except StorageFailedError as error:
            try:
                stored = self._read_json(name, _DECISION_KIND)
            except FileNotFoundError:
                raise error from None
            except (CorruptDataError, OSError):
                stored = None
            if stored is None or stored == json.loads(json.dumps(decision.to_json())):
                raise UnknownOutcomeError(
                    f"{error.message}; whether the transaction is decided shows after a restart"
                ) from error
            raise
        self.next_number = max(self.next_number, decision.number + 1)

    def fold(self, own: Iterable[Decision], remembered: Iterable[Decision]) -> None:
        """Write `remembered` into one file, then delete the files of its part `own`."""
        own = list(own)
        folded = max((decision.number for decision in own), default=self._folded)
        self._write_outcomes(remembered, folded)
        self._remove(f"{d.spec.transaction_id}{DECISION_SUFFIX}" for d in own)

    def _write_outcomes(self, remembered: Iterable[Decision], folded: int) -> None:
        value = {
            "decisions": [decision.to_json() for decision in remembered],
            "folded": folded,
            "truncated": _truncated_to_json(*self._truncated),
        }
        self._write_json(OUTCOMES_FILE, _OUTCOMES_KIND, value)
        self._folded = folded

    def save_truncated(self, offsets: Mapping[int, int], timestamp_us: int) -> None:
        """Store the first offset of each bucket's rows after an overwrite, and the time."""
        value = _truncated_to_json(offsets, timestamp_us)
        self._write_json(TRUNCATED_FILE, _TRUNCATED_KIND, value)
        self._truncated = (dict(offsets), timestamp_us)

    def load_truncated(self) -> tuple[dict[int, int], int]:
        """Return the last arguments of `save_truncated`; call `load` first.

        `outcomes` reveals an older version of the file.
        """
        names = self._filesystem.list_names(self.directory)
        if TRUNCATED_FILE not in names and self.is_former:
            return self._truncated
        stored, timestamp_us = _truncated_from_json(self._read(TRUNCATED_FILE, _TRUNCATED_KIND))
        folded, folded_us = self._truncated
        offsets = {b: max(stored.get(b, 0), folded.get(b, 0)) for b in (stored | folded)}
        self._truncated = (offsets, max(timestamp_us, folded_us))
        return self._truncated

    def drop_parts(self, transaction_id: str, parts: Iterable[str]) -> None:
        """Delete staged parts."""
        self._remove(self._part(transaction_id, part).name for part in parts)

    def drop(self, transaction_id: str, parts: Iterable[str]) -> None:
        """Delete all files of a transaction except its decision."""
        self.drop_parts(transaction_id, parts)
        self._remove([self._open_file(transaction_id).name])
        self._synced.discard(transaction_id)

    def load(self) -> tuple[list[LoadedTransaction], list[Decision]]:
        """Return the transactions with files, and the folded decisions.

        Raises `CorruptDataError` for damaged or missing files.
        """
        names = self._names()
        if self.is_former and OUTCOMES_FILE not in names:
            if not names:
                self._filesystem.make_directory(self.directory)
            folded = []
        else:
            folded = self.load_folded()
        decisions = [self.load_decision(name) for name in names if name.endswith(DECISION_SUFFIX)]
        if self.is_former:
            decisions = self._numbered(decisions)
        self.next_number = next_decision_number(
            decisions, folded=self._folded, where=self.directory
        )
        transactions = {
            decision.spec.transaction_id: LoadedTransaction(spec=decision.spec, decision=decision)
            for decision in decisions
        }
        ended = {decision.spec.transaction_id for decision in folded}
        for name in names:
            transaction_id = name.removesuffix(OPEN_SUFFIX)
            if name.endswith(OPEN_SUFFIX) and transaction_id in ended:
                self._remove([name])
            elif name.endswith(OPEN_SUFFIX) and transaction_id not in transactions:
                has_parts = any(n.startswith(f"{transaction_id}.") and n != name for n in names)
                spec = self._open_spec(name, has_parts=has_parts)
                if spec is not None:
                    transactions[spec.transaction_id] = LoadedTransaction(spec=spec)
        self._load_parts(names, transactions, ended)
        return list(transactions.values()), folded

    def _names(self) -> list[str]:
        """Return the names of whole files; delete half written files."""
        names = self._filesystem.list_names(self.directory)
        self._remove(name for name in names if name.endswith(".tmp"))
        return [name for name in names if not name.endswith(".tmp")]

    def load_folded(self) -> list[Decision]:
        """Read the folded decisions; raises `CorruptDataError`."""
        value = self._read(OUTCOMES_FILE, _OUTCOMES_KIND)
        try:
            self._folded = int(value.get("folded", 0))
            if "truncated" in value:
                self._truncated = _truncated_from_json(value["truncated"])
            return [Decision.from_json(decision) for decision in value["decisions"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptDataError(
                f"{self.directory / OUTCOMES_FILE} holds no outcomes: {error!r}"
            ) from error

    def load_decision(self, name: str) -> Decision:
        """Read one decision; raises `CorruptDataError`."""
        value = self._read(name, _DECISION_KIND)
        try:
            decision = Decision.from_json(value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptDataError(
                f"{self.directory / name} holds no decision: {error!r}"
            ) from error
        if decision.spec.transaction_id != name.removesuffix(DECISION_SUFFIX):
            raise CorruptDataError(
                f"{self.directory / name} is of transaction {decision.spec.transaction_id}"
            )
        return decision

    @property
    def folded(self) -> int:
        """The number of the last folded decision; call `load_folded` first."""
        return self._folded

    def _numbered(self, own: list[Decision]) -> list[Decision]:
        """Number and seal the decisions of a release that had no numbers."""
        numbered = []
        ordered = sorted(own, key=lambda d: (d.number or sys.maxsize, d.result.timestamp_us))
        for number, decision in enumerate(ordered, self._folded + 1):
            numbered.append(replace(decision, number=number))
            self.decide(numbered[-1])
        return numbered

    def load_open(self, name: str) -> TransactionSpec:
        """Read the specification of an open transaction; raises `CorruptDataError`."""
        value = self._read(name, _OPEN_KIND)
        try:
            spec = TransactionSpec.from_json(value)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(
                f"{self.directory / name} describes no transaction: {error!r}"
            ) from error
        if spec.transaction_id != name.removesuffix(OPEN_SUFFIX):
            raise CorruptDataError(
                f"{self.directory / name} is of transaction {spec.transaction_id}"
            )
        return spec

    def _open_spec(self, name: str, *, has_parts: bool) -> TransactionSpec | None:
        try:
            spec = self.load_open(name)
            if self.is_former:
                self._write_json(name, _OPEN_KIND, spec.to_json())
            return spec
        except CorruptDataError as error:
            if is_of_another_format((self.directory / name).read_bytes()):
                raise
            _logger.warning("event=transaction_unreadable file=%s why=%r", name, error.message)
            if not has_parts:
                # Cut off by a crash before its begin was answered: nobody knows its id.
                self._remove([name])
            return None

    def _load_parts(
        self, names: Iterable[str], found: Mapping[str, LoadedTransaction], ended: Collection[str]
    ) -> None:
        for name in names:
            if not name.endswith(PART_SUFFIX):
                continue
            transaction_id, part_id, _ = name.split(".")
            transaction = found.get(transaction_id)
            if transaction is None:
                if transaction_id in ended:
                    self._remove([name])
                else:
                    # What it belongs to was dropped, or lost its file.
                    _logger.warning("event=part_without_transaction file=%s", name)
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
        return self.directory / f"{transaction_id}{OPEN_SUFFIX}"

    def _part(self, transaction_id: str, part_id: str) -> Path:
        return self.directory / f"{transaction_id}.{part_id}{PART_SUFFIX}"

    def _identity(self, kind: str) -> StateIdentity:
        return StateIdentity(kind=kind, service_id=self._service_id, table_id=self.table_id)

    def _write_json(self, name: str, kind: str, value: Mapping[str, Any]) -> None:
        self._replace(name, kind, value)
        with _failing("write to", self.directory / name):
            self._filesystem.sync_directory(self.directory)

    def _replace(self, name: str, kind: str, value: Mapping[str, Any]) -> None:
        """Write a file; the caller makes the name durable."""
        path = self.directory / name
        with _failing("write to", path):
            replace_durably(self._filesystem, path, [seal(self._identity(kind), value)])

    def _read_json(self, name: str, kind: str) -> dict[str, Any]:
        path = self.directory / name
        data = self._filesystem.read(path, bytes_max=_JSON_BYTES_MAX)
        identity = self._identity(kind)
        return unseal(data, identity, where=str(path), is_former=self.is_former)

    def _read(self, name: str, kind: str) -> dict[str, Any]:
        try:
            return self._read_json(name, kind)
        except FileNotFoundError as error:
            raise CorruptDataError(f"{self.directory / name} is missing") from error
        except OSError as error:
            raise CorruptDataError(f"{self.directory / name} is unreadable: {error}") from error

    def _remove(self, names: Iterable[str]) -> None:
        """Delete files; the next start deletes remaining files."""
        for name in names:
            with contextlib.suppress(OSError):
                self._filesystem.remove(self.directory / name)


def next_decision_number(own: Iterable[Decision], *, folded: int, where: Path) -> int:
    """Return the number of the next decision; raises `CorruptDataError` if one is missing."""
    following = sorted(decision.number for decision in own if decision.number > folded)
    for expected, number in enumerate(following, folded + 1):
        if number != expected:
            raise CorruptDataError(
                f"{where}: decision number {expected} of the table's transactions is missing, or"
                f" {OUTCOMES_FILE} is an old version"
            )
    return folded + len(following) + 1


def _truncated_to_json(offsets: Mapping[int, int], timestamp_us: int) -> dict[str, Any]:
    return {"offsets": buckets_to_json(offsets), "timestamp_us": timestamp_us}


def _truncated_from_json(value: Mapping[str, Any]) -> tuple[dict[int, int], int]:
    try:
        return offsets_from_json(value["offsets"]), int(value["timestamp_us"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptDataError(f"no offsets at which rows begin: {error!r}") from error


@contextlib.contextmanager
def _failing(what: str, where: Path) -> Any:
    try:
        yield
    except OSError as error:
        raise StorageFailedError(
            f"cannot {what} {where.name}: {error.strerror or error}; nothing was stored"
        ) from error
