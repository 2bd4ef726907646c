"""Lose the machine of a service under load, and say to the second what happened. A program:

    make drill      (python -m integration.drill [--lease-ms 10000] [--seconds 15])

It starts an object store, an owner and a standby, a writer, and a Spark stream that copies what
is written into a second table. Then the owner's machine is lost: kill -9, and its data directory
is deleted. The standby takes over; writer and stream go on by themselves. At the end every row that
was acknowledged is looked for in both tables. The exit code is 1 if one is missing or there twice.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.streaming import StreamingQuery

import streamhouse
from integration.spark_world import spark_session
from streamhouse.api.client import StreamhouseClient
from streamhouse.connector import write_batch
from tests.support.journal_machines import JournalHome, Machine, Pair
from tests.support.python_process import end_forking, fork_from_now_on

__all__ = ["Outcome", "drill"]

_SCHEMA: Final = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())]
)
_SOURCE: Final = "default.orders"
_COPY: Final = "default.orders_copy"
_ROWS_A_CALL: Final = 20
_PAUSE_S: Final = 0.02
_PATIENCE_S: Final = 120.0


@dataclass
class Outcome:
    """What happened; moments are of `time.monotonic`."""

    lease_s: float
    began_s: float
    lost_machine_s: float = 0.0
    took_over_s: float = 0.0
    acknowledged: list[tuple[float, range]] = field(default_factory=list)
    copied_s: list[float] = field(default_factory=list)
    rows_sent: int = 0
    found: Counter[int] = field(default_factory=Counter)
    copied: Counter[int] = field(default_factory=Counter)

    @property
    def rows_acknowledged(self) -> int:
        """How many rows the writer was told are stored."""
        return sum(len(ids) for _, ids in self.acknowledged)

    @property
    def lost(self) -> int:
        """Acknowledged rows that are in the table no more."""
        return sum(self.found[i] == 0 for _, ids in self.acknowledged for i in ids)

    @property
    def twice(self) -> int:
        """Rows that are in the table more than once."""
        return sum(count > 1 for count in self.found.values())

    @property
    def wrong_copies(self) -> int:
        """Rows that the stream copied another number of times than they are there."""
        return sum(self.found[i] != self.copied[i] for i in self.found | self.copied)

    def around(self, moments_s: list[float]) -> tuple[float, float]:
        """Return the last of some moments before the machine was lost, and the first after."""
        before = max(moment for moment in moments_s if moment <= self.lost_machine_s)
        after = min(moment for moment in moments_s if moment > self.lost_machine_s)
        return before, after

    def lines(self) -> Iterator[str]:
        """Say what happened, in order, and what is left."""
        told, told_again = self.around([moment for moment, _ in self.acknowledged])
        batch, batch_again = self.around(self.copied_s)
        moments = {
            "last write acknowledged before": told,
            "last micro-batch of the stream before": batch,
            "the owner's machine is lost: kill -9, data directory deleted": self.lost_machine_s,
            "the standby owns the shard": self.took_over_s,
            "first write acknowledged after": told_again,
            "first micro-batch of the stream after": batch_again,
        }
        for what, moment in sorted(moments.items(), key=lambda item: item[1]):
            yield f"{moment - self.began_s:9.3f} s  {what}"
        yield ""
        takeover_s = self.took_over_s - self.lost_machine_s
        unknown = sum(1 for i in self.found) - (self.rows_acknowledged - self.lost)
        yield f"takeover                     {takeover_s:9.3f} s (lease {self.lease_s:g} s)"
        yield f"pause of the writer          {told_again - told:9.3f} s"
        yield f"pause of the stream          {batch_again - batch:9.3f} s"
        yield f"rows acknowledged            {self.rows_acknowledged:9,}"
        yield f"rows lost                    {self.lost:9,}"
        yield f"rows twice                   {self.twice:9,}"
        yield f"rows not acknowledged, there {unknown:9,}"
        yield f"rows copied wrongly          {self.wrong_copies:9,}"


def drill(*, lease_ms: int, seconds: float) -> Outcome:
    """Run for `seconds` before the loss of the machine, and as long after the takeover."""
    with (
        JournalHome("s3") as home,
        Pair(home, "--lease-ms", str(lease_ms)) as pair,
        spark_session() as spark,
        contextlib.ExitStack() as stack,
    ):
        owner, standby = pair.machines
        owner.start()
        owner.wait_until_owner(_PATIENCE_S)
        standby.start("--standby")
        outcome = Outcome(lease_s=lease_ms / 1_000, began_s=time.monotonic())
        client = stack.enter_context(StreamhouseClient(pair.endpoint, timeout_s=_PATIENCE_S))
        for name in (_SOURCE, _COPY):
            client.create_table(name, _SCHEMA, bucket_count=2)
        streamhouse.register(spark)
        frame = spark.readStream.format("streamhouse").option("endpoint", pair.endpoint)
        query = _copy(frame.load(_SOURCE), pair.endpoint, home.folder / "checkpoint", outcome)
        stack.callback(query.stop)
        writer = stack.enter_context(_Writer(pair.endpoint, outcome))
        while not outcome.copied_s:
            writer.go_on_for(0.5)
            assert query.isActive, query.exception()
        writer.go_on_for(seconds)
        _lose(owner, standby, outcome)
        writer.go_on_for(seconds)
        writer.end()
        _wait_for_copy(client, query)
        for name, counts in ((_SOURCE, outcome.found), (_COPY, outcome.copied)):
            counts.update(client.read(name, columns=["id"]).column("id").to_pylist())
    return outcome


def _copy(rows: DataFrame, endpoint: str, checkpoint: Path, outcome: Outcome) -> StreamingQuery:
    def copy(batch: DataFrame, number: int) -> None:
        write_batch(batch, number, table=_COPY, endpoint=endpoint)
        outcome.copied_s.append(time.monotonic())

    writer = rows.writeStream.option("checkpointLocation", str(checkpoint))
    return writer.foreachBatch(copy).start()


def _lose(owner: Machine, standby: Machine, outcome: Outcome) -> None:
    outcome.lost_machine_s = time.monotonic()
    owner.lose()
    standby.wait_until_owner(_PATIENCE_S)
    outcome.took_over_s = time.monotonic()


def _wait_for_copy(client: StreamhouseClient, query: StreamingQuery) -> None:
    """Wait until the stream has copied everything; it ends with an error if it has failed."""
    end_s = time.monotonic() + _PATIENCE_S
    while _row_count(client, _COPY) < _row_count(client, _SOURCE):
        query.awaitTermination(1)
        assert time.monotonic() < end_s, "the stream does not come to the end"


def _row_count(client: StreamhouseClient, table: str) -> int:
    return sum(at.high_watermark for at in client.positions(table).values())


class _Writer(threading.Thread):
    """Appends rows with ids of their own, one call after the other; raises what it met on `end`."""

    def __init__(self, endpoint: str, outcome: Outcome) -> None:
        super().__init__(name="drill-writer", daemon=True)
        self._endpoint = endpoint
        self._outcome = outcome
        self._is_over = threading.Event()
        self._error: BaseException | None = None

    def __enter__(self) -> _Writer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join(_PATIENCE_S)

    def go_on_for(self, seconds: float) -> None:
        """Wait while it writes."""
        self.join(seconds)
        self._raise()

    def end(self) -> None:
        """Let it end after the call it is in."""
        self._is_over.set()
        self.join(_PATIENCE_S)
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise AssertionError("the writer failed") from self._error

    def run(self) -> None:
        outcome = self._outcome
        try:
            with StreamhouseClient(self._endpoint, timeout_s=_PATIENCE_S) as client:
                while not self._is_over.wait(_PAUSE_S):
                    ids = range(outcome.rows_sent, outcome.rows_sent + _ROWS_A_CALL)
                    outcome.rows_sent = ids.stop
                    rows = {"id": list(ids), "text": ["x" * 100] * len(ids)}
                    client.append(_SOURCE, pa.table(rows, schema=_SCHEMA))
                    outcome.acknowledged.append((time.monotonic(), ids))
        except BaseException as error:  # noqa: BLE001 - told to the main thread, which raises it
            self._error = error


def main() -> int:
    """Run the drill, print what happened, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lease-ms", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=15.0, help="default: %(default)s")
    given = parser.parse_args()
    # Spark gives a stream's process ten seconds to start, which a loaded machine exceeds.
    fork_from_now_on()
    try:
        outcome = drill(lease_ms=given.lease_ms, seconds=given.seconds)
    finally:
        end_forking()
    sys.stdout.write("\n".join([*outcome.lines(), ""]))
    return 1 if outcome.lost or outcome.twice or outcome.wrong_copies else 0


if __name__ == "__main__":
    sys.exit(main())
