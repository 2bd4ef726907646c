"""The storage service's Python client: the only client of connector, tiering and applications.

`ApplicationClient` sends the calls of applications over one `transport`: writes, reads,
transactions, and questions about tables (`TableCalls`). `StorageClient` adds the calls of this
package, such as those of tiering workers (`TieringCalls`). A `Producer` writes in the background.
"""

from __future__ import annotations

from streamhouse.client._application_client import (
    DEFAULT_ENDPOINT,
    ENDPOINT_VARIABLE,
    TOKEN_VARIABLE,
    ApplicationClient,
)
from streamhouse.client._storage_client import StorageClient
from streamhouse.client._tiering import TieringIdle
from streamhouse.client.following import Source, Subscription, poll_now
from streamhouse.client.following._starts import LogStart
from streamhouse.client.http._stop_signal import STOP, StopSignal
from streamhouse.client.http.endpoint import CA_VARIABLE, with_ca_file, with_read_from
from streamhouse.client.positions._position_reports import PositionReports
from streamhouse.client.producer import Producer
from streamhouse.client.reads import LogBatch
from streamhouse.client.writing._rejects import Rejects, divided_batches
from streamhouse.client.writing.transactions import StagedRejects, Transaction
from streamhouse.client.writing.writes import AppendWriter
from streamhouse.core.model.transaction import CommitResult, TransactionStatus

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
    "divided_batches",
    "poll_now",
    "with_ca_file",
    "with_read_from",
]
