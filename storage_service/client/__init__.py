"""The storage service's Python client: the one door for connector, tiering and applications.

`ApplicationClient` sends what applications say over one `transport`: rows (`writes`, `reads`,
`transactions`), and what is asked of tables (`tables`). `StorageClient` also has what only this
package asks, as tiering workers do (`tiering`). A `Producer` writes in the background.
"""

from __future__ import annotations

from streamhouse.storage_service.client.application_client import (
    DEFAULT_ENDPOINT,
    ENDPOINT_VARIABLE,
    TOKEN_VARIABLE,
    ApplicationClient,
)
from streamhouse.storage_service.client.following import Source, Subscription, taken_now
from streamhouse.storage_service.client.following.starts import LogStart
from streamhouse.storage_service.client.http.endpoint import CA_VARIABLE, with_ca_file
from streamhouse.storage_service.client.http.stop_signal import STOP, StopSignal
from streamhouse.storage_service.client.position_reports import PositionReports
from streamhouse.storage_service.client.producer import Producer
from streamhouse.storage_service.client.reads import LogBatch
from streamhouse.storage_service.client.rejects import Rejects
from streamhouse.storage_service.client.storage_client import StorageClient
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
    "ApplicationClient",
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
