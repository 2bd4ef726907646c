"""The options of a write, read and checked; what they mean is in `options.OPTIONS`."""

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
from streamhouse.reading.options.option_values import (
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
    """What the rows of a write do to the table."""

    APPEND = "append"
    UPSERT = "upsert"
    DELETE = "delete"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """What a write wants; None is what was not given.

    `query_id` and `run_id` are of the stream in whose foreachBatch it is.

    The fields from `bucket_count` on describe the table: one that does not exist is created so, one
    that does must not be another.
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
    given = check_keys(options, uses=(WRITE,))
    connection = connection_options(options)
    if connection.name.part:
        raise InvalidRequestError(
            f"'{connection.name}' can only be read; write to '{connection.name.path}'"
        )
    app_id = (given.get("app.id") or "").strip() or None
    app_version = optional(given, "app.version", parse_version)
    is_transactional = optional(given, "write.transactional", parse_boolean) is not False
    if app_id is not None and not is_transactional:
        raise InvalidRequestError(
            "option 'app.id' makes a write happen once, which needs a transaction: remove"
            " 'write.transactional'"
        )
    if app_version is not None and app_id is None:
        raise InvalidRequestError("option 'app.version' needs 'app.id', whose version it is")
    schema_id = optional(given, "schema.id", parse_version)
    merges_schema = parse_boolean(given.get("mergeschema", "false"), name="option 'mergeSchema'")
    if schema_id is not None and merges_schema:
        raise InvalidRequestError(
            "option 'schema.id' names columns of a version there is, and 'mergeSchema' makes a new"
            " one; remove one of them"
        )
    mode = optional(given, "write.mode", _parse_mode)
    rejects = optional(given, "on.error", _parse_on_error) is True
    if rejects and (not is_transactional or mode is WriteMode.PARTIAL):
        why = "write.mode = 'partial'" if is_transactional else "write.transactional = 'false'"
        raise InvalidRequestError(
            f"option 'on.error' = 'reject' writes whole rows in a transaction with those it"
            f" rejects, and this write says {why}; remove one of them"
        )
    return WriteOptions(
        connection=connection,
        mode=mode,
        is_transactional=is_transactional,
        app_id=app_id,
        app_version=app_version,
        timeout_ms=parse_duration_ms(
            given.get("transaction.timeout") or TRANSACTION_TIMEOUT,
            name="option 'transaction.timeout'",
        ),
        sequence_column=(given.get("sequence.column") or "").strip() or None,
        merges_schema=merges_schema,
        rejects=rejects,
        keeps_nullability=parse_boolean(
            given.get("keepnullability", "false"), name="option 'keepNullability'"
        ),
        bucket_count=optional(given, "bucket.num", parse_whole_number),
        bucket_key=optional(given, "bucket.key", parse_names),
        primary_key=optional(given, "primary.key", parse_names),
        partitioned_by=optional(given, "partitioned.by", parse_expressions),
        time_zone=given.get(ZONE_MARK),
        schema_id=schema_id,
        query_id=given.get(QUERY_MARK),
        run_id=given.get(RUN_MARK),
        properties={k: v for k, v in given.items() if k.startswith(PROPERTY_PREFIXES)},
    )


def _parse_on_error(text: str, *, name: str) -> bool:
    known = ["refuse", "reject"]
    lowered = text.strip().lower()
    if lowered not in known:
        raise InvalidRequestError(
            f"{name} = '{text}' is not one of {', '.join(known)}{suggestion(lowered, known)}"
        )
    return lowered == "reject"


def _parse_mode(text: str, *, name: str) -> WriteMode:
    lowered = text.strip().lower()
    if lowered == "direct":
        raise InvalidRequestError(
            f"{name} = 'direct' is written 'write.transactional' = 'false': set that instead"
        )
    known = [mode.value for mode in WriteMode]
    if lowered not in known:
        raise InvalidRequestError(
            f"{name} = '{text}' is not one of {', '.join(known)}{suggestion(lowered, known)}"
        )
    return WriteMode(lowered)
