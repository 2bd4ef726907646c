"""The options of a write, read and checked; what they mean is in `options.OPTIONS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from streamhouse.connector.option_values import parse_expressions, parse_names, parse_positive
from streamhouse.connector.options import (
    PROPERTY_PREFIXES,
    WRITE,
    ConnectionOptions,
    check_keys,
    connection_options,
)
from streamhouse.storage_service.errors import InvalidRequestError, suggestion

__all__ = ["WriteMode", "WriteOptions", "write_options"]

_T = TypeVar("_T")


class WriteMode(StrEnum):
    """What the rows of a write do to the table."""

    APPEND = "append"
    UPSERT = "upsert"
    DELETE = "delete"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """What a write wants; None is what was not given.

    The fields from `bucket_count` on describe the table: one that does not exist is created so, one
    that does must not be another.
    """

    connection: ConnectionOptions
    mode: WriteMode | None
    sequence_column: str | None
    bucket_count: int | None
    bucket_key: tuple[str, ...] | None
    primary_key: tuple[str, ...] | None
    partitioned_by: tuple[str, ...] | None
    properties: Mapping[str, str]


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """Read and check the options of a write."""
    given = check_keys(options, uses=(WRITE,))
    connection = connection_options(options)
    if connection.name.part:
        raise InvalidRequestError(
            f"'{connection.name}' can only be read; write to '{connection.name.path}'"
        )
    return WriteOptions(
        connection=connection,
        mode=_optional(given, "write.mode", _parse_mode),
        sequence_column=(given.get("sequence.column") or "").strip() or None,
        bucket_count=_optional(given, "bucket.num", parse_positive),
        bucket_key=_optional(given, "bucket.key", parse_names),
        primary_key=_optional(given, "primary.key", parse_names),
        partitioned_by=_optional(given, "partitioned.by", parse_expressions),
        properties={k: v for k, v in given.items() if k.startswith(PROPERTY_PREFIXES)},
    )


def _parse_mode(text: str, *, key: str) -> WriteMode:
    lowered = text.strip().lower()
    known = [mode.value for mode in WriteMode]
    if lowered not in known:
        raise InvalidRequestError(
            f"option '{key}' = '{text}' is not one of {', '.join(known)}"
            f"{suggestion(lowered, known)}"
        )
    return WriteMode(lowered)


def _optional(given: Mapping[str, str], key: str, parse: Callable[..., _T]) -> _T | None:
    text = given.get(key)
    return None if text is None or not text.strip() else parse(text, key=key)
