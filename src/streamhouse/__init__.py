"""Streamhouse: a streaming lakehouse for PySpark.

This package has the public names, each loaded on first use: `import streamhouse` costs a few
milliseconds and imports neither Spark nor Iceberg nor the storage service. A name of a missing
extra (`streamhouse.core.extras`) raises an `ImportError` with the command to install it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from streamhouse.core.extras import MissingExtraError, extra_of, require

if TYPE_CHECKING:
    from streamhouse.api.async_client import AsyncStreamhouseClient
    from streamhouse.api.client import StreamhouseClient
    from streamhouse.client.following.subscription import Subscription
    from streamhouse.client.producer import Producer
    from streamhouse.client.reads import LogBatch
    from streamhouse.client.writing.replay import Replayed
    from streamhouse.client.writing.transactions import Transaction
    from streamhouse.client.writing.writes import AppendWriter
    from streamhouse.connector import cdc
    from streamhouse.connector.changes.spark_table import Table
    from streamhouse.connector.format.registration import attach, register
    from streamhouse.connector.lookup.lookup_join import lookup_join, register_lookup
    from streamhouse.connector.query.sql_query import sql
    from streamhouse.connector.query.table_changes import changes
    from streamhouse.connector.query.table_read import read
    from streamhouse.core.errors import (
        AlreadyExistsError,
        BucketNotFoundError,
        CheckFailedError,
        ColumnDroppedError,
        CommitConflictError,
        ConsumerLimitError,
        CorruptDataError,
        DatabaseExistsError,
        DatabaseNotEmptyError,
        DatabaseNotFoundError,
        FencedError,
        ForbiddenError,
        HistoryDivergedError,
        InternalError,
        InvalidNameError,
        InvalidPredicateError,
        InvalidRequestError,
        InvalidSchemaError,
        LogCutError,
        MethodNotAllowedError,
        NotFoundError,
        NotOwnerError,
        OffsetOutOfRangeError,
        OutOfOrderSequenceError,
        OverloadedError,
        RequestTooLargeError,
        RowNotFoundError,
        SchemaMismatchError,
        SnapshotNotFoundError,
        StorageFailedError,
        StreamhouseError,
        TableDamagedError,
        TableExistsError,
        TableNotFoundError,
        TransactionClosedError,
        TransactionNotFoundError,
        UnauthorizedError,
        UnavailableError,
        UnknownColumnError,
        UnknownOptionError,
        UnknownOutcomeError,
        UnsupportedError,
    )
    from streamhouse.core.model.table import TableInfo
    from streamhouse.core.model.transaction import CommitResult, TransactionStatus
    from streamhouse.reading.follow.full_subscription import TableBatch
    from streamhouse.reading.follow.stream_lag import lag
    from streamhouse.reading.plan.pinned_table import TableScan

__version__: Final = "0.1.0"

_ERRORS: Final = "streamhouse.core.errors"
# Public name -> the module that defines the name, or the module itself.
_HOMES: Final = {
    "AlreadyExistsError": _ERRORS,
    "AppendWriter": "streamhouse.client.writing.writes",
    "AsyncStreamhouseClient": "streamhouse.api.async_client",
    "attach": "streamhouse.connector.format.registration",
    "BucketNotFoundError": _ERRORS,
    "cdc": "streamhouse.connector.cdc",
    "CheckFailedError": _ERRORS,
    "changes": "streamhouse.connector.query.table_changes",
    "ColumnDroppedError": _ERRORS,
    "CommitConflictError": _ERRORS,
    "ConsumerLimitError": _ERRORS,
    "CommitResult": "streamhouse.core.model.transaction",
    "CorruptDataError": _ERRORS,
    "DatabaseExistsError": _ERRORS,
    "DatabaseNotEmptyError": _ERRORS,
    "DatabaseNotFoundError": _ERRORS,
    "FencedError": _ERRORS,
    "ForbiddenError": _ERRORS,
    "HistoryDivergedError": _ERRORS,
    "InternalError": _ERRORS,
    "InvalidNameError": _ERRORS,
    "InvalidPredicateError": _ERRORS,
    "InvalidRequestError": _ERRORS,
    "InvalidSchemaError": _ERRORS,
    "MethodNotAllowedError": _ERRORS,
    "lag": "streamhouse.reading.follow.stream_lag",
    "LogBatch": "streamhouse.client.reads",
    "LogCutError": _ERRORS,
    "lookup_join": "streamhouse.connector.lookup.lookup_join",
    "NotFoundError": _ERRORS,
    "NotOwnerError": _ERRORS,
    "OffsetOutOfRangeError": _ERRORS,
    "OutOfOrderSequenceError": _ERRORS,
    "OverloadedError": _ERRORS,
    "Producer": "streamhouse.client.producer",
    "read": "streamhouse.connector.query.table_read",
    "register": "streamhouse.connector.format.registration",
    "register_lookup": "streamhouse.connector.lookup.lookup_join",
    "Replayed": "streamhouse.client.writing.replay",
    "RequestTooLargeError": _ERRORS,
    "RowNotFoundError": _ERRORS,
    "SchemaMismatchError": _ERRORS,
    "SnapshotNotFoundError": _ERRORS,
    "sql": "streamhouse.connector.query.sql_query",
    "StorageFailedError": _ERRORS,
    "StreamhouseClient": "streamhouse.api.client",
    "StreamhouseError": _ERRORS,
    "Subscription": "streamhouse.client.following.subscription",
    "Table": "streamhouse.connector.changes.spark_table",
    "TableBatch": "streamhouse.reading.follow.full_subscription",
    "TableDamagedError": _ERRORS,
    "TableExistsError": _ERRORS,
    "TableInfo": "streamhouse.core.model.table",
    "TableNotFoundError": _ERRORS,
    "TableScan": "streamhouse.reading.plan.pinned_table",
    "Transaction": "streamhouse.client.writing.transactions",
    "TransactionClosedError": _ERRORS,
    "TransactionNotFoundError": _ERRORS,
    "TransactionStatus": "streamhouse.core.model.transaction",
    "UnauthorizedError": _ERRORS,
    "UnavailableError": _ERRORS,
    "UnknownColumnError": _ERRORS,
    "UnknownOptionError": _ERRORS,
    "UnknownOutcomeError": _ERRORS,
    "UnsupportedError": _ERRORS,
}

__all__ = [
    "AlreadyExistsError",
    "AppendWriter",
    "AsyncStreamhouseClient",
    "BucketNotFoundError",
    "CheckFailedError",
    "ColumnDroppedError",
    "CommitConflictError",
    "CommitResult",
    "ConsumerLimitError",
    "CorruptDataError",
    "DatabaseExistsError",
    "DatabaseNotEmptyError",
    "DatabaseNotFoundError",
    "FencedError",
    "ForbiddenError",
    "HistoryDivergedError",
    "InternalError",
    "InvalidNameError",
    "InvalidPredicateError",
    "InvalidRequestError",
    "InvalidSchemaError",
    "LogBatch",
    "LogCutError",
    "MethodNotAllowedError",
    "MissingExtraError",
    "NotFoundError",
    "NotOwnerError",
    "OffsetOutOfRangeError",
    "OutOfOrderSequenceError",
    "OverloadedError",
    "Producer",
    "Replayed",
    "RequestTooLargeError",
    "RowNotFoundError",
    "SchemaMismatchError",
    "SnapshotNotFoundError",
    "StorageFailedError",
    "StreamhouseClient",
    "StreamhouseError",
    "Subscription",
    "Table",
    "TableBatch",
    "TableDamagedError",
    "TableExistsError",
    "TableInfo",
    "TableNotFoundError",
    "TableScan",
    "Transaction",
    "TransactionClosedError",
    "TransactionNotFoundError",
    "TransactionStatus",
    "UnauthorizedError",
    "UnavailableError",
    "UnknownColumnError",
    "UnknownOptionError",
    "UnknownOutcomeError",
    "UnsupportedError",
    "__version__",
    "attach",
    "cdc",
    "changes",
    "lag",
    "lookup_join",
    "read",
    "register",
    "register_lookup",
    "sql",
]

# Public names of modules.
_MODULES: Final = frozenset({"cdc"})


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'streamhouse' has no attribute {name!r}")
    require(extra_of(home), f"streamhouse.{name}")
    module = importlib.import_module(home)
    value: object = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
