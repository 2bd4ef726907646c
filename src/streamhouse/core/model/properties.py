"""Table properties: every key with its default, unit and meaning in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from streamhouse.core.errors import InvalidRequestError, UnknownOptionError, suggestion
from streamhouse.core.model.merge_engine import MERGE_PROPERTY_HELP, is_merge_property
from streamhouse.core.model.records.record_format import (
    RECORD_PROPERTY_HELP,
    is_record_property,
)
from streamhouse.core.model.values.checks import CHECK_PROPERTY_HELP, is_check_property
from streamhouse.core.model.values.units import (
    parse_boolean,
    parse_bytes,
    parse_duration_ms,
    parse_whole_number,
)

__all__ = ["FIXED_PROPERTIES", "IMPORT_SOURCE_PROPERTY", "PROPERTY_HELP", "TableProperties"]


_CONSUMERS_TTL_MS_MIN: Final = 180_000


def _parse_ttl(text: str, *, name: str) -> int | None:
    return None if text.strip().lower() == "forever" else parse_duration_ms(text, name=name)


def _parse_text(text: str, *, name: str) -> str:  # noqa: ARG001 - as every parser
    return text.strip()


def _parse_format_version(text: str, *, name: str) -> int:
    return parse_whole_number(text, name=name, least=2, most=3)


def _consumers_ttl_ms(text: str, *, name: str) -> int:
    return max(parse_duration_ms(text, name=name), _CONSUMERS_TTL_MS_MIN)


def _parse_layout_freshness(text: str, *, name: str) -> int:
    return 0 if text.strip().lower() == "round" else parse_duration_ms(text, name=name)


IMPORT_SOURCE_PROPERTY: Final = "table.import.source"

FIXED_PROPERTIES: Final = (
    "table.datalake.changelog",
    IMPORT_SOURCE_PROPERTY,
)
"""What is fixed when a table is created, besides merge properties.

A history from a later beginning would be incomplete, and an import could not tell its contents.
"""

_PROPERTIES: Final[dict[str, tuple[str, str, Callable[..., Any], str]]] = {
    "table.datalake.enabled": (
        "datalake_enabled",
        "true",
        parse_boolean,
        "Tier the table into the lake; rows stay in the log at least until they are tiered.",
    ),
    "table.datalake.freshness": (
        "datalake_freshness_ms",
        "1min",
        parse_duration_ms,
        "Wanted upper bound on how far the lake lags behind the log.",
    ),
    "table.datalake.changelog": (
        "datalake_changelog",
        "false",
        parse_boolean,
        "Keep every change of a primary key table in the lake, in `<table>$changelog`. Fixed at"
        " creation.",
    ),
    "table.datalake.batch-layout.partition": (
        "datalake_batch_partition",
        "",
        _parse_text,
        "Iceberg transforms, as `day(ts), region`: keep a second lake table with this"
        " partitioning, for batch reads.",
    ),
    "table.datalake.batch-layout.sort": (
        "datalake_batch_sort",
        "",
        _parse_text,
        "Columns, or `zorder(a, b, ...)` of up to four: keep a second lake table in this order,"
        " for batch reads.",
    ),
    "table.datalake.batch-layout.freshness": (
        "datalake_batch_freshness_ms",
        "round",
        _parse_layout_freshness,
        "How far the lake table for batch reads may lag; `round`: it gets its rows in every round.",
    ),
    "table.datalake.format-version": (
        "datalake_format_version",
        "2",
        _parse_format_version,
        "Version of Iceberg's format for the table's lake tables: 2 or 3. From 2 to 3 only.",
    ),
    "table.datalake.target-file-bytes": (
        "datalake_target_file_bytes",
        "128MiB",
        parse_bytes,
        "Size at which tiering starts a new Parquet file.",
    ),
    "table.datalake.auto-maintenance": (
        "datalake_auto_maintenance",
        "true",
        parse_boolean,
        "Keep the lake table tidy after rounds: pack small files, fold deletes, expire snapshots.",
    ),
    "table.datalake.snapshot.max-age": (
        "datalake_snapshot_max_age_ms",
        "1h",
        parse_duration_ms,
        "How long a lake snapshot is kept after its replacement.",
    ),
    "table.datalake.snapshot.min-count": (
        "datalake_snapshot_min_count",
        "10",
        parse_whole_number,
        "How many of the newest lake snapshots are kept, however old.",
    ),
    "table.datalake.orphan.min-age": (
        "datalake_orphan_min_age_ms",
        "3d",
        parse_duration_ms,
        "The age at which a lake file without a reference in any metadata is deleted.",
    ),
    "table.datalake.ttl": (
        "datalake_ttl_ms",
        "forever",
        _parse_ttl,
        "How long rows stay after they were written: older ones leave the lake of a log table; of a"
        " primary key table they are deleted.",
    ),
    IMPORT_SOURCE_PROPERTY: (
        "import_source",
        "",
        _parse_text,
        "The Iceberg table and the first snapshot of an import; set by `streamhouse import`."
        " Fixed at creation.",
    ),
    "table.log.ttl": (
        "log_ttl_ms",
        "7d",
        parse_duration_ms,
        "How long rows stay in the log after they were written (lake tables: and were tiered).",
    ),
    "table.log.consumers.wait": (
        "log_consumers_wait",
        "false",
        parse_boolean,
        "Keep rows in the log, however old, until every consumer with reported positions has"
        " read them; `--disk-max` bounds it.",
    ),
    "table.log.consumers.ttl": (
        "log_consumers_ttl_ms",
        "7d",
        _consumers_ttl_ms,
        "How long a consumer is known after its last report, at least 3m: one that stands still"
        " reports once a minute.",
    ),
    "table.log.segment-bytes": (
        "log_segment_bytes",
        "128MiB",
        parse_bytes,
        "Size at which a bucket's log starts a new segment file; retention deletes whole segments.",
    ),
}

PROPERTY_HELP: Final[dict[str, tuple[str, str]]] = {
    key: (default, text) for key, (_, default, _, text) in _PROPERTIES.items()
}
"""Property key -> (default, meaning); a test compares the documentation."""

SEGMENT_BYTES_MIN: Final = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TableProperties:
    """The typed properties of one table, defaults filled in.

    Merge properties belong to `MergeRules`, batch layout properties to `BatchLayout`, record
    properties to `RecordFormat`, and constraints to `checks.py`; this class only accepts their
    keys.

    With a `datalake_batch_freshness_ms` of 0, every round writes the batch layout.
    """

    datalake_enabled: bool
    datalake_freshness_ms: int
    datalake_changelog: bool
    datalake_batch_partition: str
    datalake_batch_sort: str
    datalake_batch_freshness_ms: int
    datalake_format_version: int
    datalake_target_file_bytes: int
    datalake_auto_maintenance: bool
    datalake_snapshot_max_age_ms: int
    datalake_snapshot_min_count: int
    datalake_orphan_min_age_ms: int
    datalake_ttl_ms: int | None
    import_source: str
    log_ttl_ms: int
    log_consumers_wait: bool
    log_consumers_ttl_ms: int
    log_segment_bytes: int

    @property
    def has_batch_layout(self) -> bool:
        """Whether the table has a second lake table for batch reads."""
        return bool(self.datalake_batch_partition or self.datalake_batch_sort)

    def of_lake(self) -> dict[str, Any]:
        """Return the properties of the lake, the only properties which affect lake maintenance."""
        return {key: value for key, value in asdict(self).items() if key.startswith("datalake_")}

    @classmethod
    def parse(cls, properties: Mapping[str, str], *, table: str) -> TableProperties:
        """Read and check `properties`; raises for an unknown key or a bad value, naming both."""
        for key in properties:
            is_of_others = (
                is_merge_property(key) or is_record_property(key) or is_check_property(key)
            )
            if key not in _PROPERTIES and not is_of_others:
                known_keys = [
                    *_PROPERTIES,
                    *MERGE_PROPERTY_HELP,
                    *CHECK_PROPERTY_HELP,
                    *RECORD_PROPERTY_HELP,
                ]
                raise UnknownOptionError(
                    f"table '{table}': unknown property '{key}'"
                    f"{suggestion(key, known_keys)} (known: {', '.join(known_keys)})"
                )
        values = {
            attribute: parse(properties.get(key, default), name=f"table '{table}': property {key}")
            for key, (attribute, default, parse, _) in _PROPERTIES.items()
        }
        if values["log_segment_bytes"] < SEGMENT_BYTES_MIN:
            raise InvalidRequestError(
                f"table '{table}': property table.log.segment-bytes must be at least 64KiB"
            )
        return cls(**values)
