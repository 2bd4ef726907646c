"""A subscriber's view of a service in memory: it ends where a real one waits for rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from streamhouse.client import StorageClient
from streamhouse.core.model.table_state import TableState
from streamhouse.reading.follow.full_subscription import TableBatch, subscribe_full
from tests.support.fake_service import FakeService

__all__ = ["Follower", "follow"]


class _NothingNew(Exception):
    """A subscription would wait now."""


class _Impatient:
    """The service, but for its waiting."""

    def __init__(self, service: FakeService) -> None:
        self._service = service

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    def table_state(
        self, path: str, *, after: Mapping[int, int] | None = None, max_wait_ms: int = 0
    ) -> TableState:
        state = self._service.table_state(path, after=after, max_wait_ms=max_wait_ms)
        if after is not None and all(
            at.high_watermark <= after.get(bucket, 0) for bucket, at in state.positions.items()
        ):
            raise _NothingNew
        return state


def follow(
    service: FakeService,
    path: str,
    *,
    token: Mapping[str, Any] | None = None,
    step_rows_max: int = 7,
    **options: str,
) -> Iterator[TableBatch]:
    """Yield what a subscription with these options of a stream yields until it would wait."""
    given = {"table": path, "endpoint": "http://memory", **options}
    client = cast(StorageClient, _Impatient(service))
    batches = subscribe_full(client, given, token=token, step_rows_max=step_rows_max)
    try:
        yield from batches
    except _NothingNew:
        return


class Follower:
    """Somebody who reads a table now and then, and keeps only the last token in between."""

    def __init__(self, begin: Callable[[Mapping[str, Any] | None], Iterator[TableBatch]]) -> None:
        self._begin = begin
        self._batches: Iterator[TableBatch] | None = None
        self.token: Mapping[str, Any] | None = None
        self.seen: list[TableBatch] = []

    def read(self, count: int | None = None) -> list[TableBatch]:
        """Read so many batches, or all there are; fewer if there are no more."""
        found: list[TableBatch] = []
        while count is None or len(found) < count:
            if self._batches is None:
                self._batches = self._begin(self.token)
            batch = next(self._batches, None)
            if batch is None:
                self._batches = None
                break
            self.token = batch.token
            found.append(batch)
        self.seen += found
        return found

    def restart(self) -> None:
        """Forget everything but the token."""
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.close()  # type: ignore[attr-defined]
