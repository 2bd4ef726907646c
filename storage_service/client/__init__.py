"""The storage service's Python client: the one door for connector, tiering and applications.

`StorageClient` sends what others say over one `transport`: rows (`writes`, `reads`,
`transactions`), what is asked of tables (`tables`) and what tiering workers ask (`tiering`). A
`Producer` writes in the background.
"""

from __future__ import annotations

from streamhouse.storage_service.client.following import Source, Subscription, taken_now
from streamhouse.storage_service.client.following.starts import LogStart
from streamhouse.storage_service.client.http.endpoint import CA_VARIABLE, with_ca_file
from streamhouse.storage_service.client.http.stop_signal import STOP, StopSignal
from streamhouse.storage_service.client.position_reports import PositionReports
from streamhouse.storage_service.client.producer import Producer
from streamhouse.storage_service.client.reads import LogBatch
from streamhouse.storage_service.client.rejects import Rejects
from streamhouse.storage_service.client.storage_client import (
    DEFAULT_ENDPOINT,
    ENDPOINT_VARIABLE,
    TOKEN_VARIABLE,
    StorageClient,
)
from streamhouse.storage_service.client.tiering import TieringIdle
from streamhouse.storage_service.client.transactions import StagedRejects, Transaction
from streamhouse.storage_service.client.writes import AppendWriter
from streamhouse.storage_service.model.transaction import CommitResult, TransactionStatus

__all__ = [
    "CA_VARIABLE",
    "DEFAULT_ENDPOINT",
    "ENDPOINT_VARIABLE",
    "STOP",
    "TOKEN_VARIABLE",
    "AppendWriter",
    "CommitResult",
    "LogBatch",
    "LogStart",
    "PositionReports",
    "Producer",
    "Rejects",
    "Source",
    "StagedRejects",
    "StopSignal",
    "StorageClient",
    "Subscription",
    "TieringIdle",
    "Transaction",
    "TransactionStatus",
    "taken_now",
    "with_ca_file",
]
