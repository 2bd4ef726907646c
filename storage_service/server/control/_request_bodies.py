"""Bodies and path parameters of the control routes, checked and documented by FastAPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final

from fastapi import Query
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.transaction import Isolation, TransactionOperation
from streamhouse.core.model.values.checks import CHECKS_MAX

__all__ = [
    "AdoptTable",
    "AlterPartitioning",
    "AlterProperties",
    "AlterSchema",
    "BeginTransaction",
    "ClaimTiering",
    "CommitTransaction",
    "CompareHistory",
    "CompleteTiering",
    "CreateDatabase",
    "FailTiering",
    "HeartbeatTiering",
    "LakeHistory",
    "MoveTable",
    "PinSnapshot",
    "ReceiveTable",
    "ReportPosition",
    "TableId",
]

_TableId = Annotated[int, Field(ge=0, lt=1 << 63)]
TableId = Annotated[
    int | None, Query(ge=0, lt=1 << 63, description="The id of the table of the offsets.")
]

_Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
# Limits of lists: each entry takes time on the event loop, which delays all other requests.
NAMES_MAX: Final = 10_000
COLUMNS_MAX: Final = 2_000
PROPERTIES_MAX: Final = 1_000
BUCKETS_MAX: Final = 4_096
TEXT_CHARACTERS_MAX: Final = 10_000
_BUCKET_DIGITS_MAX: Final = 6
_FINGERPRINT_DIGITS: Final = 16
_FIELDS_MAX: Final = 100
PARTS_MAX: Final = 200_000

_Name = Annotated[str, Field(max_length=600)]
_Columns = Annotated[
    list[Annotated[str, Field(max_length=300)]], Field(max_length=COLUMNS_MAX, fail_fast=True)
]


def _first_wrong(value: Any, *, entries_max: int, is_right: Callable[[Any], bool]) -> Any:
    """Refuse an object at the first wrong entry: pydantic would list all wrong entries."""
    if isinstance(value, dict):
        if len(value) > entries_max:
            raise ValueError(f"it has {len(value)} entries; at most {entries_max}")
        for key, entry in value.items():
            if not is_right(entry):
                raise ValueError(f"the value of '{str(key)[:40]}' is not one that can be here")
    return value


def _offsets(value: Any) -> Any:
    def is_right(entry: Any) -> bool:
        return isinstance(entry, int) and 0 <= entry < 1 << 63

    value = _first_wrong(value, entries_max=BUCKETS_MAX, is_right=is_right)
    for bucket in value if isinstance(value, dict) else ():
        if not (str(bucket).isdecimal() and len(str(bucket)) < _BUCKET_DIGITS_MAX):
            raise ValueError(f"'{str(bucket)[:40]}' is no bucket")
    return value


def _fingerprints(value: Any) -> Any:
    def is_right(entry: Any) -> bool:
        return isinstance(entry, str) and len(entry) == _FINGERPRINT_DIGITS

    return _first_wrong(value, entries_max=BUCKETS_MAX, is_right=is_right)


def _texts(value: Any) -> Any:
    def is_right(entry: Any) -> bool:
        return isinstance(entry, str) and len(entry) <= TEXT_CHARACTERS_MAX

    return _first_wrong(value, entries_max=PROPERTIES_MAX, is_right=is_right)


_Offsets = Annotated[dict[int, Annotated[int, Field(ge=0)]], BeforeValidator(_offsets)]
_Texts = Annotated[dict[str, str], BeforeValidator(_texts)]
_Epoch = Annotated[int, Field(ge=1, lt=1 << 63)]
_Fingerprints = Annotated[dict[int, _Fingerprint], BeforeValidator(_fingerprints)]
_SnapshotId = Annotated[str, Field(pattern=r"^-?\d{1,19}$", coerce_numbers_to_str=True)]


class _RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, value: Any) -> Any:
        return _first_wrong(value, entries_max=_FIELDS_MAX, is_right=lambda _: True)


class _TablePositions(_RequestBody):
    """A body with offsets; `table_id` is the id of the offsets' table."""

    table_id: _TableId | None = None


class CreateDatabase(_RequestBody):
    """A new database."""

    name: _Name


class MoveTable(_RequestBody):
    """The shard to move the table to."""

    to: Annotated[str, Field(max_length=63)]


class ReportPosition(_TablePositions):
    """The position of a consumer: every row below these offsets is read.

    With `reads_lake` the consumer reads rows that have left the log from the lake. With `durable`
    the answer comes after the position is on disk. With `part` the positions in the omitted buckets
    do not change.
    """

    offsets: _Offsets
    reads_lake: bool = False
    durable: bool = False
    part: bool = False


class ReceiveTable(_RequestBody):
    """A step of a move, from the table's present shard: the ticket, and the lake catalog's digest.

    The store has `rounds` passes of files; with `is_whole` no further pass follows.
    """

    ticket: Annotated[dict[str, str | int], Field(max_length=10)]
    catalog: Annotated[str, Field(max_length=64)]
    rounds: Annotated[int, Field(ge=1, le=1_000)]
    is_whole: bool


class AlterPartitioning(_RequestBody):
    """The lake partitioning of future files."""

    partitioned_by: Annotated[
        list[Annotated[str, Field(max_length=1_000)]], Field(max_length=100, fail_fast=True)
    ]


class AlterProperties(_RequestBody):
    """Table properties to set and to remove."""

    set: _Texts = {}
    remove: Annotated[list[_Name], Field(max_length=PROPERTIES_MAX, fail_fast=True)] = []


class AlterSchema(_RequestBody):
    """Changes of a table's schema, applied in order."""

    changes: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=1_000, fail_fast=True)]


class ClaimTiering(_RequestBody):
    """A tiering worker's request for work, limited to `tables`.

    `force` also takes fresh tables, `include_idle` also tables with nothing to tier.
    """

    worker_id: Annotated[str, Field(min_length=1, max_length=200)]
    tables: Annotated[list[_Name], Field(max_length=NAMES_MAX, fail_fast=True)] | None = None
    force: bool = False
    include_idle: bool = False


class HeartbeatTiering(BaseModel):
    """A sign of life of a round, with the progress; unknown fields are ignored."""

    table: _Name
    table_id: _TableId
    epoch: _Epoch
    step: Annotated[str, Field(max_length=100)] = ""
    rows_done: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    rows_planned: Annotated[int, Field(ge=0, lt=1 << 63)] = 0


class CompletedDebt(_RequestBody):
    """Counts that maintenance of the lake table could reduce."""

    data_files: Annotated[int, Field(ge=0, lt=1 << 63)]
    delete_files: Annotated[int, Field(ge=0, lt=1 << 63)]
    snapshots: Annotated[int, Field(ge=0, lt=1 << 63)]
    small_files: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    needed_files: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    deleted_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    round_files: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    round_rows: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    maintained_at_us: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    maintenance_error: Annotated[str, Field(max_length=2_000)] = ""


class CompletedSide(_RequestBody):
    """A committed snapshot of a side table, such as the changelog table."""

    snapshot_id: _SnapshotId
    table_uuid: _Name
    tiered_offsets: _Offsets
    truncated_offsets: _Offsets = {}
    fingerprints: _Fingerprints = {}


class LakeCovered(_RequestBody):
    """The part of the log that a snapshot of a lake table covers."""

    epoch: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    tiered_offsets: _Offsets
    fingerprints: _Fingerprints = {}

    def covered(self) -> CoveredOffsets:
        """Return the value for the comparison of histories."""
        return CoveredOffsets(**self.model_dump(exclude={"table_id"}))


class LakeHistory(LakeCovered, _TablePositions):
    """The part of the log that a lake snapshot covers, with the id of the table."""


class CompareHistory(_RequestBody):
    """A lake table to compare with the log, and offsets for the log's fingerprints."""

    table: _Name
    table_id: _TableId
    lake: LakeCovered | None = None
    offsets: _Offsets = {}


class CompleteTiering(_RequestBody):
    """A committed lake snapshot. The id is text because it exceeds 2**53."""

    table: _Name
    table_id: _TableId
    epoch: _Epoch
    lake_snapshot_id: _SnapshotId
    lake_table_uuid: _Name
    tiered_offsets: _Offsets
    changelog: CompletedSide | None = None
    batch: CompletedSide | None = None
    keep_lease: bool = False
    debt: CompletedDebt | None = None
    truncated_offsets: _Offsets | None = None
    expired_offsets: _Offsets = {}
    expired_at_us: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    maintenance_due_us: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    fingerprints: _Fingerprints = {}


class FailTiering(_RequestBody):
    """A failed round, with the reason."""

    table: _Name
    table_id: _TableId
    epoch: _Epoch
    error: Annotated[str, Field(max_length=10_000)]


class PinSnapshot(_RequestBody):
    """A lake snapshot to keep for a while. The id is text because it exceeds 2**53."""

    snapshot_id: _SnapshotId
    ttl_ms: Annotated[int, Field(lt=1 << 63)]


class TakeBackup(_RequestBody):
    """POST /v1/admin/backup."""

    with_lake: bool = False


class AdoptTable(_RequestBody):
    """The adoption of a lake table; `force`: even if another service may still use the table.

    `replace`: in place of a table with different rows in its log. `dry_run`: only report the
    differences.
    """

    force: bool = False
    replace: bool = False
    dry_run: bool = False


class BeginTransaction(_RequestBody):
    """The operation of a new transaction; each `version` of `app_id` is committed once.

    `source` numbers the versions, in the lifetime `run` of the source.
    """

    operation: TransactionOperation
    columns: _Columns | None = None
    schema_id: Annotated[str, Field(max_length=40)] | None = None
    app_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    version: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    source: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    run: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    timeout_ms: Annotated[int, Field(lt=1 << 63)] | None = None
    join: bool = False


_Parts = Annotated[
    list[Annotated[str, Field(max_length=200)]], Field(max_length=PARTS_MAX, fail_fast=True)
]


_BrokenRows = Annotated[
    dict[Annotated[str, Field(max_length=128)], Annotated[int, Field(ge=0, lt=1 << 63)]],
    Field(max_length=CHECKS_MAX),
]


class LinkedParts(_RequestBody):
    """Parts of a transaction on the table of rejected rows, committed together or not at all.

    `broken` counts the rows by the constraint that they break, for metrics.
    """

    transaction_id: Annotated[str, Field(max_length=200)]
    parts: _Parts
    broken: _BrokenRows = {}


class CommitTransaction(_TablePositions):
    """The parts to commit, in the order of application.

    With `read_offsets` (bucket -> offset, of all buckets) the commit succeeds only if the rows read
    by the transaction, and `table_id`, have not changed since.
    """

    parts: _Parts
    read_offsets: _Offsets | None = None
    isolation: Isolation = Isolation.SNAPSHOT
    rejected: LinkedParts | None = None
