"""Identifies the table of a client's position: a table created again under its name is a new table.

A position is an offset, which means nothing in another table. Three facts identify the table:
- the leader epoch, which differs between tables. Metadata, ListOffsets, OffsetFetch and every
  record batch carry the epoch, and clients send the epoch with Fetch, ListOffsets,
  OffsetForLeaderEpoch and commits
- the topic id of Fetch 13
- the connection's history (`broker/_read_tables.py`): some clients send neither epoch nor id, and a
  client's epoch and id from Metadata may be newer than the position Every API with a position uses
  these checks.
"""

from __future__ import annotations

import contextlib
import uuid
from typing import Final

from streamhouse.core.errors import OffsetOutOfRangeError, TableNotFoundError
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.kafka.protocol_errors import (
    FencedLeaderEpochError,
    UnknownLeaderEpochError,
    UnknownTopicIdError,
)
from streamhouse.storage_service.kafka.topics import leader_epoch_of, topic_id_of, topic_name_of
from streamhouse.storage_service.kafka_door._exchange import KafkaExchange
from streamhouse.storage_service.server.caller import Level

__all__ = [
    "NO_EPOCH",
    "check_leader_epoch",
    "check_position",
    "epoch_of",
    "is_of_another",
    "note_validated",
    "table_of_id",
]

NO_EPOCH: Final = -1
# The epoch of every table in earlier versions of the service.
_EPOCH_OF_ALL: Final = 0


def epoch_of(table: OpenTable) -> int:
    """Return the leader epoch of all partitions of a table."""
    return leader_epoch_of(table.info.table_id)


def is_of_another(table_id: int, epoch: int) -> bool:
    """Return whether a client's leader epoch belongs to another table."""
    return epoch > _EPOCH_OF_ALL and epoch != leader_epoch_of(table_id)


def check_leader_epoch(table: OpenTable, epoch: int) -> None:
    """Raise unless the client's leader epoch is the epoch of the present table.

    Clients then refresh Metadata, and validate their positions against the new epoch.
    """
    if epoch == NO_EPOCH or epoch == (table_epoch := epoch_of(table)):
        return
    if epoch < table_epoch:
        raise FencedLeaderEpochError(
            f"table '{table.path}' was made again: it has leader epoch {table_epoch}, and {epoch}"
            " is that of an earlier table of this name"
        )
    raise UnknownLeaderEpochError(
        f"table '{table.path}' has leader epoch {table_epoch}; {epoch} is that of a later table"
    )


def check_position(
    exchange: KafkaExchange, table: OpenTable, partition: int, *, last_epoch: int
) -> None:
    """Raise `OffsetOutOfRangeError`, once, if a Fetch's position belongs to another table.

    `last_epoch` is the epoch of the record before the position. After the error a consumer applies
    the reset policy, or informs the application.
    """
    topic = topic_name_of(table.path, table.info.descriptor.properties)
    is_switch = exchange.client.read_tables.note_read(topic, table.info.table_id, partition)
    if is_switch or is_of_another(table.info.table_id, last_epoch):
        raise OffsetOutOfRangeError(
            f"table '{table.path}', bucket {partition}: the position belongs to an earlier table of"
            " this name; reset the position"
        )


def note_validated(exchange: KafkaExchange, table: OpenTable, partition: int) -> None:
    """Record a client's validation of the position against the present table.

    Call this only if the client sends the table's leader epoch: other clients request offsets also
    to measure their lag, with a position of another table.
    """
    topic = topic_name_of(table.path, table.info.descriptor.properties)
    exchange.client.read_tables.note_read(topic, table.info.table_id, partition)


def table_of_id(exchange: KafkaExchange, topic_id: uuid.UUID) -> OpenTable:
    """Return the table of a topic id; raises as `Service.readable`.

    Also raises `UnknownTopicIdError`, both for an unknown id and for a table that the caller may
    not read.
    """
    path = exchange.broker.topic_ids.path(topic_id)
    if path is not None and exchange.caller.may(Level.READ, str(path)):
        with contextlib.suppress(TableNotFoundError):
            table = exchange.service.readable(str(path))
            # The path may belong to another table by now.
            if topic_id_of(exchange.broker.cluster_id, table.info.table_id) == topic_id:
                return table
    raise UnknownTopicIdError(f"there is no topic with the id {topic_id} here")
