"""Following tables: a `Subscription` has the batches of one table or of several as they come.

A `Source` is what it has of one table. `log_stream` follows a log over the network; who else has
batches that go on for ever makes a source of them. `Standing` says how far a named reader is.
"""

from __future__ import annotations

from streamhouse.client.following._source import Source
from streamhouse.client.following._standing import Standing
from streamhouse.client.following.subscription import (
    TABLES_MAX,
    Subscription,
    taken_now,
)

__all__ = ["TABLES_MAX", "Source", "Standing", "Subscription", "taken_now"]
