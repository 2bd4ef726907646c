"""Streamhouse: a streaming lakehouse for PySpark.

The public names are here; each is loaded on first use, so that `import streamhouse` costs a few
milliseconds and brings in none of Spark, Iceberg or the storage service. A name that needs an extra
(`streamhouse.extras`) which is not installed raises an `ImportError` that says what to install.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from streamhouse.extras import MissingExtraError, extra_of, require

if TYPE_CHECKING:
    from streamhouse.async_client import AsyncStreamhouseClient
    from streamhouse.client import StreamhouseClient
    from streamhouse.connector import cdc
    from streamhouse.connector.changes.table import Table
    from streamhouse.connector.format.registration import attach, register
    from streamhouse.connector.lookup.lookup_join import lookup_join, register_lookup
    from streamhouse.connector.plan.table_read import TableScan
    from streamhouse.connector.query.sql_query import sql
    from streamhouse.connector.query.table_read import read
    from streamhouse.connector.stream.full_subscription import TableBatch
    from streamhouse.connector.stream.stream_lag import lag
    from streamhouse.storage_service.client.following.subscription import Subscription
    from streamhouse.storage_service.client.producer import Producer
    from streamhouse.storage_service.client.reads import LogBatch
    from streamhouse.storage_service.client.replay import Replayed
    from streamhouse.storage_service.client.transactions import Transaction
    from streamhouse.storage_service.client.writes import AppendWriter
    from streamhouse.storage_service.errors import (
        AlreadyExistsError,
        BucketNotFoundError,
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
    from streamhouse.storage_service.model.table import TableInfo
    from streamhouse.storage_service.model.transaction import CommitResult, TransactionStatus

__version__: Final = "0.1.0"

_ERRORS: Final = "streamhouse.storage_service.errors"
# Public name -> the module that defines it, or that it is.
_HOMES: Final = {
    "AlreadyExistsError": _ERRORS,
    "AppendWriter": "streamhouse.storage_service.client.writes",
    "AsyncStreamhouseClient": "streamhouse.async_client",
    "attach": "streamhouse.connector.format.registration",
    "BucketNotFoundError": _ERRORS,
    "cdc": "streamhouse.connector.cdc",
    "ColumnDroppedError": _ERRORS,
    "CommitConflictError": _ERRORS,
    "ConsumerLimitError": _ERRORS,
    "CommitResult": "streamhouse.storage_service.model.transaction",
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
    "lag": "streamhouse.connector.stream.stream_lag",
    "LogBatch": "streamhouse.storage_service.client.reads",
    "LogCutError": _ERRORS,
    "lookup_join": "streamhouse.connector.lookup.lookup_join",
    "NotFoundError": _ERRORS,
    "NotOwnerError": _ERRORS,
    "OffsetOutOfRangeError": _ERRORS,
    "OutOfOrderSequenceError": _ERRORS,
    "OverloadedError": _ERRORS,
    "Producer": "streamhouse.storage_service.client.producer",
    "read": "streamhouse.connector.query.table_read",
    "register": "streamhouse.connector.format.registration",
    "register_lookup": "streamhouse.connector.lookup.lookup_join",
    "Replayed": "streamhouse.storage_service.client.replay",
    "RequestTooLargeError": _ERRORS,
    "RowNotFoundError": _ERRORS,
    "SchemaMismatchError": _ERRORS,
    "SnapshotNotFoundError": _ERRORS,
    "sql": "streamhouse.connector.query.sql_query",
    "StorageFailedError": _ERRORS,
    "StreamhouseClient": "streamhouse.client",
    "StreamhouseError": _ERRORS,
    "Subscription": "streamhouse.storage_service.client.following.subscription",
    "Table": "streamhouse.connector.changes.table",
    "TableBatch": "streamhouse.connector.stream.full_subscription",
    "TableDamagedError": _ERRORS,
    "TableExistsError": _ERRORS,
    "TableInfo": "streamhouse.storage_service.model.table",
    "TableNotFoundError": _ERRORS,
    "TableScan": "streamhouse.connector.plan.table_read",
    "Transaction": "streamhouse.storage_service.client.transactions",
    "TransactionClosedError": _ERRORS,
    "TransactionNotFoundError": _ERRORS,
    "TransactionStatus": "streamhouse.storage_service.model.transaction",
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
    "lag",
    "lookup_join",
    "read",
    "register",
    "register_lookup",
    "sql",
]

# Public names that are modules themselves.
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
