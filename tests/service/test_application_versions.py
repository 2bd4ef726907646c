"""A version that was committed is skipped, and seen to be; one of other rows is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.client import StorageClient, Transaction
from streamhouse.core.errors import InvalidRequestError
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64())])
ANOTHER = "with another checkpoint, begins version"
TWICE = "is written a second time in one micro-batch"


def _begin(client: StorageClient, version: int, **named: Any) -> Transaction:
    return client.begin_transaction("events", app_id="app", version=version, **named)


def _commit(client: StorageClient, version: int, **named: Any) -> str:
    with _begin(client, version, **named) as transaction:
        part = transaction.stage(pa.table({"id": [version]}, schema=SCHEMA))
        return str(transaction.commit([part]).status)


def _row_count(client: StorageClient) -> int:
    return sum(position.high_watermark for position in client.positions("events").values())


def _statuses(client: StorageClient) -> list[tuple[int, str, bool]]:
    """Version, status and whether it has an id, oldest first."""
    return [
        (entry["version"], entry["status"], entry["transaction_id"] is not None)
        for entry in reversed(client.transactions("events"))
    ]


def test_a_skipped_version_is_listed_and_logged(client: StorageClient, tmp_path: Path) -> None:
    client.create_table("events", SCHEMA)
    assert _commit(client, 5) == "committed"
    for _ in range(3):
        assert _begin(client, 5, join=True).is_skipped
    assert _begin(client, 4).is_skipped

    assert _statuses(client) == [
        (5, "committed", True),
        (5, "skipped", False),
        (4, "skipped", False),
    ]
    assert _row_count(client) == 1


def test_the_versions_of_another_source_or_run_are_refused(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        client.create_table("events", SCHEMA)
        for version in range(3):
            assert _commit(client, version, source="a", run="1") == "committed"
        with pytest.raises(InvalidRequestError, match=f"stream a, and stream b, {ANOTHER} 0"):
            _begin(client, 0, source="b", run="7")
        with pytest.raises(InvalidRequestError, match=TWICE):
            _begin(client, 2, source="a", run="1")
        # A run that begins anew repeats what an earlier one committed; so may who says nothing.
        assert _begin(client, 2, source="a", run="2").is_skipped
        assert _begin(client, 1, source="a", run="1").is_skipped
        assert _begin(client, 2).is_skipped
        # Of two that are open at once, one is committed. The other is no repetition.
        first, second, third = (
            _begin(client, 3, source=source, run="2", join=True) for source in ("a", "a", "b")
        )
        assert first.transaction_id == second.transaction_id != third.transaction_id
        other = _begin(client, 3, source="a", run="2")
        parts = [t.stage(pa.table({"id": [3]}, schema=SCHEMA)) for t in (first, third, other)]
        first.commit(parts[:1])
        with pytest.raises(InvalidRequestError, match=ANOTHER):
            third.commit(parts[1:2])
        with pytest.raises(InvalidRequestError, match=TWICE):
            other.commit(parts[2:])
        assert _row_count(client) == 4
        log = service.log_text()
    assert "event=transaction_skipped table=default.events app_id=app version=2" in log
    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        with pytest.raises(InvalidRequestError, match=ANOTHER):
            _begin(client, 3, source="b")
        with pytest.raises(InvalidRequestError, match=TWICE):
            _begin(client, 3, source="a", run="2")
        assert _commit(client, 4, source="b", run="1") == "committed"
        assert _row_count(client) == 5
