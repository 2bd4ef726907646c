"""The tables of this process by topic id. Event loop only."""

from __future__ import annotations

import time
import uuid
from typing import Final

from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.kafka.topics import topic_id_of

__all__ = ["TopicIds"]

# A look at a thousand tables takes a millisecond, and clients may send any id.
_LOOK_AGAIN_S: Final = 0.1


class TopicIds:
    """Finds tables by topic id; dropped tables disappear."""

    def __init__(self, manager: TabletManager) -> None:
        self._manager = manager
        self._paths: dict[uuid.UUID, TablePath] = {}
        self._next_look_s = 0.0

    def announce(self, table_id: int, path: TablePath) -> uuid.UUID:
        """Return the topic id of a table for a client, and make the table known by the id."""
        topic_id = topic_id_of(self._manager.service_id, table_id)
        self._paths[topic_id] = path
        return topic_id

    def path(self, topic_id: uuid.UUID) -> TablePath | None:
        """Return the path of the table with this topic id, including moving tables.

        A table that was not announced may be found up to a tenth of a second later.
        """
        path = self._paths.get(topic_id)
        if path is None and time.monotonic() >= self._next_look_s:
            self._look()
            path = self._paths.get(topic_id)
        return path

    def _look(self) -> None:
        service_id, away = self._manager.service_id, self._manager.away.values()
        infos = [table.info for table in self._manager.open_tables()]
        infos += [moving.info for moving in away if moving.info is not None]
        self._paths = {topic_id_of(service_id, info.table_id): info.path for info in infos}
        self._next_look_s = time.monotonic() + _LOOK_AGAIN_S
