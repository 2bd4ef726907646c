"""Following tables: a `Subscription` delivers the batches of tables as they arrive.

A `Source` supplies the batches of one table: `log_stream` follows a log over the network, and other
modules wrap their own endless batches. `ConsumerPosition` tracks the position of a named reader.
"""

from __future__ import annotations

from streamhouse.client.following._consumer_position import ConsumerPosition
from streamhouse.client.following._source import Source
from streamhouse.client.following.subscription import (
    TABLES_MAX,
    Subscription,
    poll_now,
)

__all__ = ["TABLES_MAX", "ConsumerPosition", "Source", "Subscription", "poll_now"]
