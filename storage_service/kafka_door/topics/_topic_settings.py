"""The settings of a topic: their table properties, and the settings shown for an existing table.

`retention.ms` and `cleanup.policy` map to table properties, and table properties are settings under
their own names. Kafka's other settings control how brokers keep records. The service accepts such
settings without effect, and shows the effective values. Pure functions without state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kio.schema.errors import ErrorCode

from streamhouse.core.model.properties import TableProperties
from streamhouse.core.model.records.record_format import ValueFormat
from streamhouse.core.model.table import TableDescriptor, TableInfo
from streamhouse.storage_service.kafka_door._error_codes import RefusedError

__all__ = [
    "COMPACTED_PROPERTIES",
    "LOG_TTL",
    "RETENTION",
    "check_settings",
    "is_compacted",
    "is_compacted_table",
    "is_table_property",
    "properties_of",
    "settings_of",
]

LOG_TTL: Final = "table.log.ttl"
RETENTION: Final = "retention.ms"
COMPACTED_PROPERTIES: Final[Mapping[str, str]] = {"table.datalake.changelog": "true"}
"""For the table of a compacted topic: changes stay readable for ever, from the lake."""
_LAKE: Final = "table.datalake.enabled"
_LAKE_TTL: Final = "table.datalake.ttl"
_POLICY: Final = "cleanup.policy"
_TIMESTAMP_TYPE: Final = "message.timestamp.type"
_BYTES_MAX: Final = "max.message.bytes"
_KEY: Final = "key"
_COMPACT, _DELETE = "compact", "delete"
_FOR_EVER: Final = "-1"
_PREFIXES: Final = ("table.", "kafka.")
_LONG_MAX: Final = "9223372036854775807"
# Name -> the value that holds, whatever is requested. All settings of Kafka 4 and 3.
_FIXED: Final[Mapping[str, str]] = {
    "compression.gzip.level": "-1",
    "compression.lz4.level": "9",
    "compression.type": "producer",
    "compression.zstd.level": "3",
    "delete.retention.ms": "86400000",
    "file.delete.delay.ms": "60000",
    "flush.messages": "1",
    "flush.ms": "0",
    "follower.replication.throttled.replicas": "",
    "index.interval.bytes": "4096",
    "leader.replication.throttled.replicas": "",
    "local.retention.bytes": "-2",
    "local.retention.ms": "-2",
    "max.compaction.lag.ms": _LONG_MAX,
    "message.downconversion.enable": "false",
    "message.format.version": "3.0-IV1",
    "message.timestamp.after.max.ms": _LONG_MAX,
    "message.timestamp.before.max.ms": _LONG_MAX,
    "message.timestamp.difference.max.ms": _LONG_MAX,
    "min.cleanable.dirty.ratio": "0.5",
    "min.compaction.lag.ms": "0",
    "min.insync.replicas": "1",
    "preallocate": "false",
    "remote.log.copy.disable": "false",
    "remote.log.delete.on.disable": "false",
    "remote.storage.enable": "false",
    "retention.bytes": "-1",
    "segment.bytes": "134217728",
    "segment.index.bytes": "10485760",
    "segment.jitter.ms": "0",
    "segment.ms": "604800000",
    "unclean.leader.election.enable": "false",
}
# Further settings without effect; the shown value depends on the table or the service.
_SHOWN: Final = frozenset((_TIMESTAMP_TYPE, _BYTES_MAX))


def is_table_property(name: str) -> bool:
    """Return whether a setting is a table property under its own name."""
    return name.startswith(_PREFIXES)


def properties_of(topic: str, configs: Mapping[str, str | None]) -> dict[str, str]:
    """Return the table properties for the settings of a topic.

    Raises `RefusedError` for an unsupported setting.
    """
    properties = dict[str, str]()
    is_compact = is_compacted(topic, configs)
    for name, value in configs.items():
        if value is None or name in _FIXED or name in _SHOWN or name == _POLICY:
            continue
        if is_table_property(name):
            properties[name] = value
        elif name == RETENTION:
            properties |= _retention(topic, value)
        else:
            raise _refused(topic, f"there is no setting '{name[:200]}'")
    if is_compact and LOG_TTL in properties and _DELETE in _policies(topic, configs):
        # Rows of that age are deleted, and consumers read tombstones.
        properties.setdefault(_LAKE_TTL, properties[LOG_TTL])
    return properties


def is_compacted(topic: str, configs: Mapping[str, str | None]) -> bool | None:
    """Return whether the settings request compaction; None if the settings do not say."""
    policies = _policies(topic, configs)
    return _COMPACT in policies if policies else None


def check_settings(
    topic: str,
    configs: Mapping[str, str | None],
    table: TableProperties,
    *,
    is_compact: bool,
    is_keyed: bool,
) -> None:
    """Raise `RefusedError` unless a table fulfils the settings.

    `table` has the properties of the settings already.
    """
    is_compaction_requested = is_compacted(topic, configs)
    if is_compaction_requested is not None and is_compaction_requested != is_compact:
        accepted = "records with keys alone" if is_compact else "records without keys, too"
        raise _refused(
            topic,
            f"{_POLICY} = {configs[_POLICY]}, and its table takes {accepted}, which does not"
            " change; make another topic",
        )
    for_ever = is_compaction_requested or configs.get(RETENTION) == _FOR_EVER
    if for_ever and not _is_kept(table, is_keyed=is_keyed):
        raise _refused(
            topic,
            "its table does not keep rows in the lake once they leave the log, so nothing is kept"
            f" for ever: that needs {_LAKE} = true, and with a primary key"
            " table.datalake.changelog = true;"
            f" else give {RETENTION} in milliseconds",
        )


def is_compacted_table(table: TableDescriptor) -> bool:
    """Return whether a table suits a compacted topic: rows by key, or raw records with keys.

    The second form is for several partitions. Its consumers get every record of a key, and the last
    record has the key's value.
    """
    if table.primary_key:
        return True
    names = [column.name for column in table.schema.columns]
    is_raw = table.record_format().value is ValueFormat.RAW
    return is_raw and _KEY in names and not table.schema.columns[names.index(_KEY)].nullable


def settings_of(info: TableInfo, *, record_bytes_max: int) -> dict[str, str]:
    """Return the settings of an existing table, without the table properties."""
    table = TableProperties.parse(info.descriptor.properties, table=str(info.path))
    is_keyed = bool(info.descriptor.primary_key)
    kept_ms: int | None = table.log_ttl_ms
    if LOG_TTL not in info.descriptor.properties and _is_kept(table, is_keyed=is_keyed):
        kept_ms = table.datalake_ttl_ms
    policy = _DELETE
    if is_compacted_table(info.descriptor):
        policy = _COMPACT if table.datalake_ttl_ms is None else f"{_COMPACT},{_DELETE}"
    has_times = info.descriptor.record_format().timestamp_column is not None
    return {
        **_FIXED,
        _BYTES_MAX: str(record_bytes_max),
        _POLICY: policy,
        RETENTION: _FOR_EVER if kept_ms is None else str(kept_ms),
        _TIMESTAMP_TYPE: "CreateTime" if has_times else "LogAppendTime",
    }


def _is_kept(table: TableProperties, *, is_keyed: bool) -> bool:
    """Return whether rows that have left the log stay readable in the lake."""
    return table.datalake_enabled and (table.datalake_changelog or not is_keyed)


def _policies(topic: str, configs: Mapping[str, str | None]) -> set[str]:
    value = configs.get(_POLICY)
    if value is None:
        return set()
    policies = {policy.strip() for policy in value.split(",")}
    if not policies <= {_COMPACT, _DELETE}:
        raise _refused(topic, f"{_POLICY} = '{value[:80]}' must be of delete and compact")
    return policies


def _retention(topic: str, value: str) -> dict[str, str]:
    if value == _FOR_EVER:
        return {}
    if not (value.isascii() and value.isdigit() and len(value) < 16 and int(value) > 0):
        raise _refused(topic, f"{RETENTION} = '{value[:80]}' must be milliseconds, or -1")
    return {LOG_TTL: f"{value}ms"}


def _refused(topic: str, why: str) -> RefusedError:
    return RefusedError(ErrorCode.invalid_config, f"topic '{topic}': {why}")
