"""The options of a write, read and checked; `options.OPTIONS` describes each option."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from streamhouse.core.errors import InvalidRequestError, suggestion
from streamhouse.core.model.values.units import (
    parse_boolean,
    parse_duration_ms,
    parse_whole_number,
)
from streamhouse.reading.options.connection import ConnectionOptions, connection_options
from streamhouse.reading.options.name_lists import (
    parse_expressions,
    parse_names,
    parse_version,
)
from streamhouse.reading.options.options import (
    PROPERTY_PREFIXES,
    QUERY_MARK,
    RUN_MARK,
    TRANSACTION_TIMEOUT,
    WRITE,
    ZONE_MARK,
    check_keys,
    optional,
)

__all__ = ["WriteMode", "WriteOptions", "write_options"]


class WriteMode(StrEnum):
    """How the rows of a write change the table."""

    APPEND = "append"
    UPSERT = "upsert"
    DELETE = "delete"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """The options of a write; None for a missing option.

    `query_id` and `run_id` are of the stream, for a write in foreachBatch.

    The fields from `bucket_count` on describe the table: a missing table is created by this
    description, and an existing table must agree with it.
    """

    connection: ConnectionOptions
    mode: WriteMode | None
    is_transactional: bool
    app_id: str | None
    app_version: int | None
    timeout_ms: int
    sequence_column: str | None
    merges_schema: bool
    rejects: bool
    keeps_nullability: bool
    bucket_count: int | None
    bucket_key: tuple[str, ...] | None
    primary_key: tuple[str, ...] | None
    partitioned_by: tuple[str, ...] | None
    properties: Mapping[str, str]
    time_zone: str | None = None
    schema_id: int | None = None
    query_id: str | None = None
    run_id: str | None = None


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """Read and check the options of a write."""
    values = check_keys(options, uses=(WRITE,))
    connection = connection_options(options)
    if connection.name.part:
        raise InvalidRequestError(
            f"'{connection.name}' can only be read; write to '{connection.name.path}'"
        )
    app_id = (values.get("app.id") or "").strip() or None
    app_version = optional(values, "app.version", parse_version)
    is_transactional = optional(values, "write.transactional", parse_boolean) is not False
    if app_id is not None and not is_transactional:
        raise InvalidRequestError(
            "option 'app.id' makes a write happen once, which needs a transaction: remove"
            " 'write.transactional'"
        )
    if app_version is not None and app_id is None:
        raise InvalidRequestError("option 'app.version' needs 'app.id', whose version it is")
    schema_id = optional(values, "schema.id", parse_version)
    merges_schema = parse_boolean(values.get("mergeschema", "false"), name="option 'mergeSchema'")
    if schema_id is not None and merges_schema:
        raise InvalidRequestError(
            "option 'schema.id' names an existing version of the schema, and 'mergeSchema' makes a"
            " new version; remove one of the two"
        )
    mode = optional(values, "write.mode", _parse_mode)
    rejects = optional(values, "on.error", _parse_on_error) is True
    if rejects and (not is_transactional or mode is WriteMode.PARTIAL):
        why = "write.mode = 'partial'" if is_transactional else "write.transactional = 'false'"
        raise InvalidRequestError(
            "option 'on.error' = 'reject' writes whole rows and the rejected rows in one"
            f" transaction, and this write has {why}; remove one of the two"
        )
    return WriteOptions(
        connection=connection,
        mode=mode,
        is_transactional=is_transactional,
        app_id=app_id,
        app_version=app_version,
        timeout_ms=parse_duration_ms(
            values.get("transaction.timeout") or TRANSACTION_TIMEOUT,
            name="option 'transaction.timeout'",
        ),
        sequence_column=(values.get("sequence.column") or "").strip() or None,
        merges_schema=merges_schema,
        rejects=rejects,
        keeps_nullability=parse_boolean(
            values.get("keepnullability", "false"), name="option 'keepNullability'"
        ),
        bucket_count=optional(values, "bucket.num", parse_whole_number),
        bucket_key=optional(values, "bucket.key", parse_names),
        primary_key=optional(values, "primary.key", parse_names),
        partitioned_by=optional(values, "partitioned.by", parse_expressions),
        time_zone=values.get(ZONE_MARK),
        schema_id=schema_id,
        query_id=values.get(QUERY_MARK),
        run_id=values.get(RUN_MARK),
        properties={k: v for k, v in values.items() if k.startswith(PROPERTY_PREFIXES)},
    )


def _parse_on_error(text: str, *, name: str) -> bool:
    choices = ["refuse", "reject"]
    lowered = text.strip().lower()
    if lowered not in choices:
        raise InvalidRequestError(
            f"{name} = '{text}' is not one of {', '.join(choices)}{suggestion(lowered, choices)}"
        )
    return lowered == "reject"


def _parse_mode(text: str, *, name: str) -> WriteMode:
    lowered = text.strip().lower()
    if lowered == "direct":
        raise InvalidRequestError(
            f"{name} = 'direct' is written 'write.transactional' = 'false': set that instead"
        )
    choices = [mode.value for mode in WriteMode]
    if lowered not in choices:
        raise InvalidRequestError(
            f"{name} = '{text}' is not one of {', '.join(choices)}{suggestion(lowered, choices)}"
        )
    return WriteMode(lowered)
