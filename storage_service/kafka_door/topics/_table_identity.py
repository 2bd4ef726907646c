"""Which table a client's position is of: a table that is made again under its name is another one.

A position is an offset, and means nothing in another table. Three things tell the table:
- the leader epoch: each table has one of its own. Metadata, ListOffsets, OffsetFetch and every
  record batch have it, and clients send it with Fetch, ListOffsets, OffsetForLeaderEpoch, commits
- the topic id of Fetch 13
- what the connection did before (`broker/read_tables.py`): some clients send neither, and epoch and
  id that a client has from Metadata do not say where its position is from
Every API that takes a position asks here.
"""

from __future__ import annotations

import contextlib
import uuid
from typing import Final

from streamhouse.core.errors import OffsetOutOfRangeError, TableNotFoundError
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.kafka.errors import (
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
    "stands_in",
    "table_of_id",
]

NO_EPOCH: Final = -1
# Earlier versions told it of every table.
_EPOCH_OF_ALL: Final = 0


def epoch_of(table: OpenTable) -> int:
    """Return the leader epoch of all partitions of a table."""
    return leader_epoch_of(table.info.table_id)


def is_of_another(table_id: int, epoch: int) -> bool:
    """Whether a client names a leader epoch, and it is that of another table."""
    return epoch > _EPOCH_OF_ALL and epoch != leader_epoch_of(table_id)


def check_leader_epoch(table: OpenTable, epoch: int) -> None:
    """Raise unless a client that names the leader epoch of a topic knows the table that it is now.

    Clients ask for Metadata anew then, and compare their positions with the new epoch.
    """
    if epoch == NO_EPOCH or epoch == (own := epoch_of(table)):
        return
    if epoch < own:
        raise FencedLeaderEpochError(
            f"table '{table.path}' was made again: it has leader epoch {own}, and {epoch} is that"
            " of an earlier table of this name"
        )
    raise UnknownLeaderEpochError(
        f"table '{table.path}' has leader epoch {own}; {epoch} is that of a later table"
    )


def check_position(
    exchange: KafkaExchange, table: OpenTable, partition: int, *, last_epoch: int
) -> None:
    """Raise `OffsetOutOfRangeError`, once, where the position of a Fetch is of another table.

    `last_epoch` is that of the record before the position. Consumers begin then where their reset
    policy says, or tell their application.
    """
    topic = topic_name_of(table.path, table.info.descriptor.properties)
    is_other = exchange.client.read_tables.note_read(topic, table.info.table_id, partition)
    if is_other or is_of_another(table.info.table_id, last_epoch):
        raise OffsetOutOfRangeError(
            f"table '{table.path}', bucket {partition}: the position is that of an earlier table of"
            " this name; begin anew"
        )


def stands_in(exchange: KafkaExchange, table: OpenTable, partition: int) -> None:
    """Note that a client has compared its position with the table as it is now.

    To be called where the client names the table's leader epoch: others ask for offsets also to
    show how far they are behind, with a position of another table.
    """
    topic = topic_name_of(table.path, table.info.descriptor.properties)
    exchange.client.read_tables.note_read(topic, table.info.table_id, partition)


def table_of_id(exchange: KafkaExchange, asked: uuid.UUID) -> OpenTable:
    """Return the table of a topic's id that the caller may read; raises as `Service.readable`.

    Also `UnknownTopicIdError`, whether there is none here or the caller may not read it.
    """
    path = exchange.broker.topic_ids.path(asked)
    if path is not None and exchange.caller.may(Level.READ, str(path)):
        with contextlib.suppress(TableNotFoundError):
            table = exchange.service.readable(str(path))
            # The path may be that of another table by now.
            if topic_id_of(exchange.broker.cluster_id, table.info.table_id) == asked:
                return table
    raise UnknownTopicIdError(f"there is no topic with the id {asked} here")
