"""A time becomes an offset at one place, `server/history/since_time.py`, which knows log and lake.

The log's own index knows what the log still has. Whoever asks it for a reader loses the rows that
have left the log, so each user of it is named here with the reason.
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.architecture.source_files import library_files

_SERVICE: Final = "streamhouse.storage_service"

# Method -> the modules that may call it, and why.
USERS: Final[dict[str, dict[str, str]]] = {
    "offset_for_timestamp": {
        f"{_SERVICE}.log.readable_log": "hands it on to its segments",
        f"{_SERVICE}.log.segments._segment_chain": "hands it on to a segment",
        f"{_SERVICE}.server.history.since_time": "is the answer for all readers",
        f"{_SERVICE}.engine.keys.key_table": "asks which changes may leave the log",
        f"{_SERVICE}.engine.upkeep.consumer_lag": "asks which rows will leave the log",
        f"{_SERVICE}.engine.upkeep.row_ages": "notes ages before rows leave the log",
    },
    "removed_until_us": {f"{_SERVICE}.server.history.since_time": "is the answer for all readers"},
    "first_since": {
        f"{_SERVICE}.server.service": "is the entry of since_time",
        f"{_SERVICE}.server.history._lake_cursors": "hands it on to the lake",
        f"{_SERVICE}.server.history.lake_reads": "hands it on to the lake",
        f"{_SERVICE}.server.history.since_time": "is the answer for all readers",
        f"{_SERVICE}.server.control._table_routes": "asks the service, for HTTP",
        f"{_SERVICE}.kafka_door.fetching._list_offsets": "asks the service, for Kafka clients",
    },
    "offsets_for_timestamp": {
        "streamhouse.api.async_client": "awaits the call of the client",
        "streamhouse.client.following._log_source": "asks the service, for a subscription",
        "streamhouse.reading.plan._key_table_read": "asks the service, for asOfTimestamp",
        "streamhouse.reading.plan._lake_or_log": "asks the service, for batch reads",
        "streamhouse.reading.follow._stream_start": "asks the service, for streams",
    },
}


@pytest.mark.parametrize("method", USERS)
def test_a_time_is_looked_up_by_those_who_are_named(method: str) -> None:
    users = {
        file.module
        for file in library_files()
        for node in file.nodes
        if method == getattr(node, "attr", getattr(node, "id", None))
    }

    assert users == USERS[method].keys(), (
        f"ask Service.first_since for a time, or say here why {method} is right"
    )
