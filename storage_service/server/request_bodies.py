"""Bodies and path parameters of the control routes, as FastAPI checks and documents them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field

from streamhouse.storage_service.model.lake_coverage import CoveredOffsets
from streamhouse.storage_service.model.transaction import TransactionOperation

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
    "PinSnapshot",
    "TableName",
]

TableName = Annotated[str, Path(description="`database.table`; `table` alone is in `default`.")]

_Epoch = Annotated[int, Field(ge=1)]
_Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
_SnapshotId = Annotated[str, Field(pattern=r"^-?\d{1,19}$", coerce_numbers_to_str=True)]


class _RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CreateDatabase(_RequestBody):
    """A new database."""

    name: str


class AlterPartitioning(_RequestBody):
    """The lake partitioning of files to come."""

    partitioned_by: Annotated[list[str], Field(max_length=100)]


class AlterProperties(_RequestBody):
    """Table properties to set and to remove."""

    set: dict[str, str] = {}
    remove: list[str] = []


class AlterSchema(_RequestBody):
    """Changes of a table's schema, applied in order."""

    changes: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=1_000)]


class ClaimTiering(_RequestBody):
    """A tiering worker asking for work; `tables` limits it, `force` takes fresh tables too,
    `include_idle` those with nothing to tier."""

    worker_id: Annotated[str, Field(min_length=1, max_length=200)]
    tables: list[str] | None = None
    force: bool = False
    include_idle: bool = False


class HeartbeatTiering(BaseModel):
    """A sign of life of a round, and how far it is; unknown fields are ignored."""

    table: str
    epoch: _Epoch
    step: Annotated[str, Field(max_length=100)] = ""
    rows_done: Annotated[int, Field(ge=0)] = 0
    rows_planned: Annotated[int, Field(ge=0)] = 0


class CompletedDebt(_RequestBody):
    """What maintenance of the lake table could make fewer of."""

    data_files: Annotated[int, Field(ge=0)]
    delete_files: Annotated[int, Field(ge=0)]
    snapshots: Annotated[int, Field(ge=0)]
    small_files: Annotated[int, Field(ge=0)] = 0
    deleted_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    maintained_at_us: Annotated[int, Field(ge=0)] | None = None
    maintenance_error: Annotated[str, Field(max_length=2_000)] = ""


class CompletedSide(_RequestBody):
    """A committed snapshot of a lake table beside the rows' own; its id is text as theirs is."""

    snapshot_id: _SnapshotId
    table_uuid: str
    tiered_offsets: dict[int, Annotated[int, Field(ge=0)]]
    truncated_offsets: dict[int, Annotated[int, Field(ge=0)]] = {}
    fingerprints: dict[int, _Fingerprint] = {}


class LakeHistory(_RequestBody):
    """What a snapshot of a lake table says of the log that its rows came from."""

    epoch: Annotated[int, Field(ge=0)] = 0
    tiered_offsets: dict[int, Annotated[int, Field(ge=0)]]
    fingerprints: dict[int, _Fingerprint] = {}

    def covered(self) -> CoveredOffsets:
        """Return it as the judge of histories takes it."""
        return CoveredOffsets(**self.model_dump())


class CompareHistory(_RequestBody):
    """A lake table to compare with the log, and offsets to tell the log's fingerprints at."""

    table: str
    table_id: int
    lake: LakeHistory | None = None
    offsets: dict[int, Annotated[int, Field(ge=0)]] = {}


class CompleteTiering(_RequestBody):
    """A lake snapshot that is committed. Its id is text because it exceeds 2**53."""

    table: str
    table_id: int
    epoch: _Epoch
    lake_snapshot_id: _SnapshotId
    lake_table_uuid: str
    tiered_offsets: dict[int, Annotated[int, Field(ge=0)]]
    changelog: CompletedSide | None = None
    batch: CompletedSide | None = None
    keep_lease: bool = False
    debt: CompletedDebt | None = None
    truncated_offsets: dict[int, Annotated[int, Field(ge=0)]] | None = None
    expired_offsets: dict[int, Annotated[int, Field(ge=0)]] = {}
    maintenance_due_us: Annotated[int, Field(ge=0)] | None = None
    fingerprints: dict[int, _Fingerprint] = {}


class FailTiering(_RequestBody):
    """A round that failed, and why."""

    table: str
    epoch: _Epoch
    error: Annotated[str, Field(max_length=10_000)]


class PinSnapshot(_RequestBody):
    """A lake snapshot to keep for a while. Its id is text because it exceeds 2**53."""

    snapshot_id: _SnapshotId
    ttl_ms: int


class TakeBackup(_RequestBody):
    """POST /v1/admin/backup."""

    with_lake: bool = False


class AdoptTable(_RequestBody):
    """A lake table to go on from; `force`: though another service may still use it.

    `replace`: in place of a table whose log has other rows; `dry_run`: only tell which.
    """

    force: bool = False
    replace: bool = False
    dry_run: bool = False


class BeginTransaction(_RequestBody):
    """What a transaction is to do; `version` of `app_id` is committed once."""

    operation: TransactionOperation
    columns: list[str] | None = None
    app_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    version: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    timeout_ms: int | None = None
    join: bool = False


class CommitTransaction(_RequestBody):
    """The parts to commit, in the order in which they apply."""

    parts: list[str]
