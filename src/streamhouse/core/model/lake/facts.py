"""Names and states of a lake table shared by its writer (tiering) and its readers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

import pyarrow as pa

from streamhouse.core.errors import HistoryDivergedError, InvalidRequestError
from streamhouse.core.model.offsets import buckets_to_json, offsets_from_json
from streamhouse.core.model.schema import (
    BUCKET_COLUMN,
    CHANGE_TYPE_COLUMN,
    OFFSET_COLUMN,
    TIMESTAMP_COLUMN,
)

__all__ = [
    "LAKE_SYSTEM_FIELDS",
    "LakeCatalog",
    "LakeDebt",
    "LakeRole",
    "LakeState",
    "SideLakeState",
    "are_rows_scattered",
    "is_rest_catalog",
    "parse_properties",
]

VERSION_3: Final = 3
"""The format version of Iceberg with row ids, deletion vectors and default values."""
ROW_ID_COLUMN: Final = "_row_id"
UPDATED_COLUMN: Final = "_last_updated_sequence_number"
LINEAGE_COLUMNS: Final = (ROW_ID_COLUMN, UPDATED_COLUMN)
"""The columns of Iceberg's own in files of format version 3."""
COMMIT_USER_PROPERTY: Final = "commit-user"
COMMIT_USER: Final = "streamhouse-tiering"
SERVICE_ID_PROPERTY: Final = "streamhouse.service-id"
TABLE_ID_PROPERTY: Final = "streamhouse.table-id"
CHANGELOG_OF_PROPERTY: Final = "streamhouse.changelog-of-table-id"
BATCH_OF_PROPERTY: Final = "streamhouse.batch-layout-of-table-id"
OWNER_PROPERTIES: Final = (TABLE_ID_PROPERTY, CHANGELOG_OF_PROPERTY, BATCH_OF_PROPERTY)
"""Each lake table has one of these properties: the id of its table, and its `LakeRole`."""
TIERING_EPOCH_PROPERTY: Final = "streamhouse.tiering-epoch"
TIERED_OFFSETS_PROPERTY: Final = "streamhouse.tiered-offsets"
TRUNCATED_OFFSETS_PROPERTY: Final = "streamhouse.truncated-offsets"
EXPIRED_OFFSETS_PROPERTY: Final = "streamhouse.expired-offsets"
EXPIRED_AT_PROPERTY: Final = "streamhouse.expired-at-us"
LOG_FINGERPRINTS_PROPERTY: Final = "streamhouse.log-fingerprints"
"""Per bucket, the fingerprint of the log at the tiered offset: 16 hexadecimal digits."""
TIERED_SEQUENCE_PROPERTY: Final = "streamhouse.tiered-sequence-number"
CHANGED_OUTSIDE_PROPERTY: Final = "streamhouse.changed-outside"
"""Set on a lake table whose rows another engine has deleted or updated."""
ORPHANS_REMOVED_PROPERTY: Final = "streamhouse.orphans-removed-ms"
"""The time of the last search for files of a lake table without a reference in its metadata."""
CATALOG_TIMEOUT_PROPERTY: Final = "streamhouse.catalog-timeout-ms"
"""The time limit of a request to a REST catalog."""
CATALOG_URIS_PROPERTY: Final = "streamhouse.catalog-uris"
"""The URIs of a REST catalog served by several processes, separated by commas, `uri` first."""
LAKE_PATHS_PROPERTY: Final = "streamhouse.lake-paths"
"""A catalog property, set by the operator: more places, separated by commas, where lake tables and
their files may lie besides the warehouse and the table's location."""
REST_CATALOG_PATH: Final = "/iceberg"
"""The path of a service's REST catalog; as `uri`, it stands for the catalog of this service."""
VIA_HEADER: Final = "x-streamhouse-via"
"""The ids of the services which a request to a catalog has passed, the latest last."""
SCATTERED_ADVICE: Final = (
    "a round writes a file to each bucket of each partition that it has rows of: give the table"
    " fewer buckets or coarser partitions, or a longer table.datalake.freshness"
)
# Fewer files, or more rows per file, do not slow readers.
_SCATTERED_FILES_MIN: Final = 64
_FILE_ROWS_MIN: Final = 100

_S3_VARIABLES: Final = {
    "s3.access-key-id": ("AWS_ACCESS_KEY_ID",),
    "s3.secret-access-key": ("AWS_SECRET_ACCESS_KEY",),
    "s3.session-token": ("AWS_SESSION_TOKEN",),
    "s3.region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "s3.endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
}

LAKE_SYSTEM_FIELDS: Final = (
    pa.field(BUCKET_COLUMN, pa.int32(), nullable=False),
    pa.field(OFFSET_COLUMN, pa.int64(), nullable=False),
    pa.field(TIMESTAMP_COLUMN, pa.timestamp("us", tz="UTC"), nullable=False),
)
"""Appended to the user's columns in this order; their field ids start at SYSTEM_FIELD_ID_FIRST."""

SYSTEM_FIELD_ID_FIRST: Final = 1_000_000
"""Far above any user column, so that adding columns never collides."""

LAKE_CHANGE_TYPE_FIELD: Final = pa.field(CHANGE_TYPE_COLUMN, pa.string(), nullable=False)
"""Between the user's and the system columns of a full history: `+I`, `-U`, `+U` or `-D`."""

CHANGE_TYPE_FIELD_ID: Final = SYSTEM_FIELD_ID_FIRST + len(LAKE_SYSTEM_FIELDS)


class LakeRole(StrEnum):
    """The role of a lake table: a table's rows, its full history, or its batch layout.

    The rows come in the order of the stream; the batch layout has the same rows, laid out for batch
    reads.
    """

    ROWS = "rows"
    CHANGES = "changelog"
    BATCH = "batch"

    @property
    def owner_property(self) -> str:
        """The property with the id of the table that owns a lake table of this role."""
        return _OWNER_PROPERTY[self]

    def lake_name(self, table: str) -> str:
        """Return the name of the lake table of `table` with this role."""
        return table if self is LakeRole.ROWS else f"{table}${self.value}"


_OWNER_PROPERTY: Final = {
    LakeRole.ROWS: TABLE_ID_PROPERTY,
    LakeRole.CHANGES: CHANGELOG_OF_PROPERTY,
    LakeRole.BATCH: BATCH_OF_PROPERTY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SideLakeState:
    """The snapshot of a full history or a batch layout, and the end offsets per bucket.

    A full history holds every change from offset 0 on, and always covers the snapshot of the rows.
    A batch layout holds the rows as of its offsets, which may be behind or ahead. Rows below
    `truncated_offsets` were overwritten; the snapshot's files do not have them. `fingerprints` are
    the log's fingerprints at the tiered offsets, for the buckets with a fingerprint.
    """

    snapshot_id: int
    table_uuid: str
    tiered_offsets: Mapping[int, int]
    truncated_offsets: Mapping[int, int] = field(default_factory=dict)
    fingerprints: Mapping[int, str] = field(default_factory=dict)

    def as_lake_state(
        self, role: LakeRole, *, expired_offsets: Mapping[int, int] | None = None
    ) -> LakeState:
        """Return the state as that of a lake table with this role."""
        return LakeState(
            snapshot_id=self.snapshot_id,
            table_uuid=self.table_uuid,
            tiered_offsets=self.tiered_offsets,
            truncated_offsets=self.truncated_offsets,
            expired_offsets=expired_offsets or {},
            fingerprints=self.fingerprints,
            role=role,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "snapshot_id": str(self.snapshot_id),
            "table_uuid": self.table_uuid,
            "tiered_offsets": buckets_to_json(self.tiered_offsets),
            "truncated_offsets": buckets_to_json(self.truncated_offsets),
            "fingerprints": buckets_to_json(self.fingerprints),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SideLakeState:
        """Read the JSON form."""
        return cls(
            snapshot_id=int(value["snapshot_id"]),
            table_uuid=str(value["table_uuid"]),
            tiered_offsets=offsets_from_json(value["tiered_offsets"]),
            truncated_offsets=offsets_from_json(value.get("truncated_offsets", {})),
            fingerprints=_fingerprints_from_json(value),
        )


def _fingerprints_from_json(value: Mapping[str, Any]) -> dict[int, str]:
    return {int(b): str(fingerprint) for b, fingerprint in value.get("fingerprints", {}).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeState:
    """The lake snapshot that readers may use, and the end offsets per bucket that it covers.

    Snapshot: `snapshot_id` is None until the first round commits. `table_uuid` is the Iceberg
    table's uuid: a worker with a wrong catalog sees another uuid. `tiered_offsets` has every
    bucket. `changelog` is set after the first round of a table with `table.datalake.changelog`,
    `batch` after the first round with a batch layout. `role` names the lake table of this state: a
    read of the batch layout uses a state with the layout's snapshot.

    Round: `tiering_worker` has claimed the unfinished round `tiering_epoch`, or is empty. Rounds up
    to `batch_since_epoch` may have written a batch layout which the table has lost since. Rounds up
    to `altered_in_epoch` may report a `maintenance_due_us` for properties which have changed since.
    Maintenance is due at `maintenance_due_us` even without new rows; None: not due.

    Rows: Rows below `truncated_offsets` were overwritten and are in no file of the snapshot. Rows
    of a log table below `expired_offsets` have reached `table.datalake.ttl`; files in any lake
    table may still have them. The newest of these rows was written at `expired_at_us`; 0: there are
    none, or an earlier release took them. `fingerprints` are the log's fingerprints at the tiered
    offsets, for the buckets with a fingerprint. A `diverged` text describes how the lake's history
    differs from the log's; writes and tiering then stop.
    """

    snapshot_id: int | None = None
    table_uuid: str | None = None
    tiering_epoch: int = 0
    tiering_worker: str = ""
    tiered_offsets: Mapping[int, int] = field(default_factory=dict)
    tiered_at_us: int | None = None
    changelog: SideLakeState | None = None
    batch: SideLakeState | None = None
    batch_tiered_at_us: int | None = None
    batch_since_epoch: int = 0
    role: LakeRole = LakeRole.ROWS
    truncated_offsets: Mapping[int, int] = field(default_factory=dict)
    expired_offsets: Mapping[int, int] = field(default_factory=dict)
    expired_at_us: int = 0
    maintenance_due_us: int | None = None
    altered_in_epoch: int = 0
    fingerprints: Mapping[int, str] = field(default_factory=dict)
    diverged: str = ""

    def refuse_diverged(self, path: object) -> None:
        """Raise `HistoryDivergedError` if the lake of the table at `path` has another history."""
        if self.diverged:
            raise HistoryDivergedError(
                f"{self.diverged}. '{path}$lake' and '{path}$log' can be read, each by itself"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form; a snapshot id is a string because it exceeds 2**53."""
        return {
            "snapshot_id": None if self.snapshot_id is None else str(self.snapshot_id),
            "table_uuid": self.table_uuid,
            "tiering_epoch": self.tiering_epoch,
            "tiering_worker": self.tiering_worker,
            "tiered_offsets": buckets_to_json(self.tiered_offsets),
            "tiered_at_us": self.tiered_at_us,
            "changelog": None if self.changelog is None else self.changelog.to_json(),
            "batch": None if self.batch is None else self.batch.to_json(),
            "batch_tiered_at_us": self.batch_tiered_at_us,
            "batch_since_epoch": self.batch_since_epoch,
            "truncated_offsets": buckets_to_json(self.truncated_offsets),
            "expired_offsets": buckets_to_json(self.expired_offsets),
            "expired_at_us": self.expired_at_us,
            "maintenance_due_us": self.maintenance_due_us,
            "altered_in_epoch": self.altered_in_epoch,
            "fingerprints": buckets_to_json(self.fingerprints),
            "diverged": self.diverged,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LakeState:
        """Read the JSON form."""
        snapshot_id = value.get("snapshot_id")
        changelog, batch = value.get("changelog"), value.get("batch")
        return cls(
            snapshot_id=None if snapshot_id is None else int(snapshot_id),
            table_uuid=value.get("table_uuid"),
            tiering_epoch=int(value.get("tiering_epoch", 0)),
            tiering_worker=str(value.get("tiering_worker", "")),
            tiered_offsets=offsets_from_json(value.get("tiered_offsets", {})),
            tiered_at_us=value.get("tiered_at_us"),
            changelog=None if changelog is None else SideLakeState.from_json(changelog),
            batch=None if batch is None else SideLakeState.from_json(batch),
            batch_tiered_at_us=value.get("batch_tiered_at_us"),
            batch_since_epoch=int(value.get("batch_since_epoch", 0)),
            truncated_offsets=offsets_from_json(value.get("truncated_offsets", {})),
            expired_offsets=offsets_from_json(value.get("expired_offsets", {})),
            expired_at_us=int(value.get("expired_at_us", 0)),
            maintenance_due_us=value.get("maintenance_due_us"),
            altered_in_epoch=int(value.get("altered_in_epoch", 0)),
            fingerprints=_fingerprints_from_json(value),
            diverged=str(value.get("diverged", "")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeDebt:
    """The files and snapshots of a lake table as last seen by its worker; maintenance reduces them.

    `small_files` may be packed, and `needed_files` would be enough for all of the data. Delete
    files hide `deleted_share` of the rows. The last round with rows wrote `round_rows` rows into
    `round_files` files. `maintained_at_us` is the time of this worker's last maintenance,
    `maintenance_error` the reason of a failure.
    """

    data_files: int
    delete_files: int
    snapshots: int
    small_files: int = 0
    needed_files: int = 0
    deleted_share: float = 0.0
    round_files: int = 0
    round_rows: int = 0
    maintained_at_us: int | None = None
    maintenance_error: str = ""

    @property
    def is_scattered(self) -> bool:
        """Whether the rows of the last round are scattered; see `are_rows_scattered`."""
        return are_rows_scattered(self.round_rows, files=self.round_files)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {name: getattr(self, name) for name in self.__slots__}

    def status_json(self) -> dict[str, Any]:
        """Return the JSON form with the derived fields, for people and their programs."""
        return {**self.to_json(), "is_scattered": self.is_scattered}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LakeDebt:
        """Read the JSON form."""
        return cls(**{name: value[name] for name in cls.__slots__ if name in value})

    def completed_by(self, previous: LakeDebt | None) -> LakeDebt:
        """Return this report, completed with the fields of the `previous` report."""
        if previous is None:
            return self
        report = self
        if self.maintained_at_us is None:
            report = replace(report, maintained_at_us=previous.maintained_at_us)
        if not self.round_files:
            report = replace(
                report, round_files=previous.round_files, round_rows=previous.round_rows
            )
        return report


def are_rows_scattered(rows: int, *, files: int) -> bool:
    """Whether a round wrote many files for few rows: the table has too many places.

    A place is one bucket of one partition; a round writes one file to each place with new rows.
    """
    return files >= _SCATTERED_FILES_MIN and rows < files * _FILE_ROWS_MIN


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeCatalog:
    """How to open the Iceberg catalog: pyiceberg's `load_catalog(name, **properties)`."""

    name: str
    properties: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"name": self.name, "properties": dict(self.properties)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LakeCatalog:
        """Read the JSON form."""
        return cls(name=str(value["name"]), properties=dict(value["properties"]))

    def at(self, *endpoints: str, token: str | None) -> LakeCatalog:
        """Return the catalog as a client of the service at `endpoints` opens it."""
        if self.properties.get("uri") != REST_CATALOG_PATH:
            return self
        uris = [endpoint.rstrip("/") + REST_CATALOG_PATH for endpoint in endpoints]
        whole = {**self.properties, "uri": uris[0]}
        if len(uris) > 1:
            whole[CATALOG_URIS_PROPERTY] = ",".join(uris)
        return LakeCatalog(
            name=self.name, properties=whole if token is None else {**whole, "token": token}
        )

    def __repr__(self) -> str:
        # Properties may hold credentials, which must never reach a log or a Spark plan.
        return f"LakeCatalog(name={self.name!r}, properties=<{len(self.properties)} hidden>)"


def tiered_offsets_to_property(tiered_offsets: Mapping[int, int]) -> str:
    """Return the value of the snapshot property `streamhouse.tiered-offsets`."""
    return json.dumps(buckets_to_json(tiered_offsets))


def tiered_offsets_from_property(value: str) -> dict[int, int]:
    """Read the value of the snapshot property `streamhouse.tiered-offsets`."""
    return offsets_from_json(json.loads(value))


def fingerprints_to_property(fingerprints: Mapping[int, str]) -> str:
    """Return the value of the snapshot property `streamhouse.log-fingerprints`."""
    return json.dumps(buckets_to_json(fingerprints))


def fingerprints_from_property(value: str) -> dict[int, str]:
    """Read the value of the snapshot property `streamhouse.log-fingerprints`."""
    return {int(b): str(fingerprint) for b, fingerprint in json.loads(value).items()}


def is_rest_catalog(properties: Mapping[str, str]) -> bool:
    """Whether pyiceberg would open a REST catalog with these properties."""
    kind = properties.get("type")
    if "py-catalog-impl" in properties:
        return False
    if kind is None:
        return properties.get("uri", "").startswith(("http", REST_CATALOG_PATH))
    return kind.lower() == "rest"


def parse_properties(texts: Iterable[str], *, name: str) -> dict[str, str]:
    """Read properties in the form of the command line, each `KEY=VALUE`, of the option `name`."""
    properties = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            # The value may be a secret: only the key is repeated.
            raise InvalidRequestError(f"{name} '{key}' must be KEY=VALUE")
        properties[key] = value
    return properties


def s3_properties_from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the `s3.*` catalog properties for AWS's environment variables.

    Raises `InvalidRequestError` if an access key is missing.
    """
    properties = {}
    for key, variables in _S3_VARIABLES.items():
        values = [environ[name] for name in variables if environ.get(name)]
        if values:
            properties[key] = values[0]
    for key in ("s3.access-key-id", "s3.secret-access-key"):
        if key not in properties:
            raise InvalidRequestError(
                f"--lake-credentials shared needs {_S3_VARIABLES[key][0]} in the environment"
            )
    return properties
