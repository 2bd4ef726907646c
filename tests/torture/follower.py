"""A reader that follows a table by subscription through everything that happens to the service."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import pyarrow as pa

from streamhouse.api.client import StreamhouseClient

__all__ = ["Follower"]


class Follower(threading.Thread):
    """Subscribes once, from the first offset; hands every batch on, in order and without gaps.

    `error` is what ended it, None while all is well.
    """

    def __init__(
        self,
        endpoint: str,
        table: str,
        on_rows: Callable[[int, pa.RecordBatch, int], None],
        *,
        buckets: int,
        patience_s: float,
    ) -> None:
        super().__init__(name=f"Follower-{table}", daemon=True)
        self.table = table
        self.error: BaseException | None = None
        self._endpoint = endpoint
        self._on_rows = on_rows
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._ends = dict.fromkeys(range(buckets), 0)
        self._is_over = False

    def run(self) -> None:
        try:
            with StreamhouseClient(self._endpoint, timeout_s=self._patience_s) as client:
                for batch in client.subscribe(self.table, start=dict(self._ends)):
                    end = self._ends[batch.bucket]
                    assert batch.base_offset == end, (
                        f"{self.table}, bucket {batch.bucket}: a subscription goes on at"
                        f" {batch.base_offset} after {end}"
                    )
                    self._on_rows(batch.bucket, batch.data, end)
                    with self._changed:
                        self._ends[batch.bucket] = batch.end_offset
                        self._changed.notify_all()
                        if self._is_over:
                            return
        except BaseException as error:  # noqa: BLE001 - told to the main thread, which raises it
            with self._changed:
                self.error = None if self._is_over else error
                self._changed.notify_all()

    def wait_for(self, ends: Mapping[int, int], timeout_s: float) -> None:
        """Wait until it has everything below `ends`."""
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: (
                    self.error is not None
                    or all(self._ends[bucket] >= end for bucket, end in ends.items())
                ),
                timeout_s,
            )
        if self.error is not None:
            raise AssertionError(f"{self.name} failed") from self.error
        assert arrived, f"{self.table}: a subscription is at {self._ends}, not at {dict(ends)}"

    def end(self) -> None:
        """Take no more; what comes is ignored."""
        with self._changed:
            self._is_over = True
