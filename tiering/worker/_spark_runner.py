"""Runs the tasks of a round on Spark: one Spark task a split. The only pyspark import of tiering.

Executors need this package and pyarrow, and connect to the storage service and the lake directly:
no row passes through the driver.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.accumulators import Accumulator
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from streamhouse.core.errors import StreamhouseError, UnavailableError, UnsupportedError
from streamhouse.core.threads import NamedThread
from streamhouse.reading.tail.lake_task import SplitResult, TieringSplit, run_split
from streamhouse.tiering.tasks._rewrite_task import RewriteResult, RewriteTask, run_rewrite

__all__ = ["SparkRunner"]

_logger = logging.getLogger(__name__)

_POLL_S: Final = 0.2
_Result = TypeVar("_Result")


class SparkRunner:
    """A `TaskRunner` on a Spark session, local or cluster; the caller stops the session.

    Spark retries a task after a passing error, up to `spark.task.maxFailures` times. A failed
    attempt deletes its files.
    """

    def __init__(self, spark: SparkSession) -> None:
        if not hasattr(spark, "_jsparkSession"):
            raise UnsupportedError("tiering runs on a Spark driver, not through Spark Connect")
        self._spark = spark

    @property
    def parallelism(self) -> int:
        """How many tasks Spark runs at once by default."""
        return int(self._spark.sparkContext.defaultParallelism)

    def run(
        self,
        splits: Sequence[TieringSplit],
        *,
        on_rows: Callable[[int], None],
        is_cancelled: Callable[[], bool],
    ) -> list[SplitResult]:
        """See `TaskRunner.run`."""
        label = f"tier {splits[0].table}" if splits else "tier"
        return self._map(run_split, splits, label=label, on_rows=on_rows, is_cancelled=is_cancelled)

    def rewrite(
        self,
        tasks: Sequence[RewriteTask],
        *,
        on_rows: Callable[[int], None],
        is_cancelled: Callable[[], bool],
    ) -> list[RewriteResult]:
        """See `TaskRunner.rewrite`."""
        label = f"maintain {tasks[0].table}" if tasks else "maintain"
        return self._map(
            run_rewrite, tasks, label=label, on_rows=on_rows, is_cancelled=is_cancelled
        )

    def _map(
        self,
        function: Callable[..., _Result],
        tasks: Sequence[Any],
        *,
        label: str,
        on_rows: Callable[[int], None],
        is_cancelled: Callable[[], bool],
    ) -> list[_Result]:
        context = self._spark.sparkContext
        group = f"streamhouse-tiering-{uuid.uuid4().hex[:12]}"
        rows_written: Accumulator[int] = context.accumulator(0)
        watcher = _Watcher(
            rows_written,
            on_rows=on_rows,
            is_cancelled=is_cancelled,
            cancel=lambda: context.cancelJobGroup(group),
        )
        context.setJobGroup(group, f"streamhouse: {label}", True)

        def run_one(task: Any) -> _Result | StreamhouseError:
            try:
                return function(task, on_rows=rows_written.add)
            except StreamhouseError as error:
                if error.retriable:
                    raise
                # A value instead of a failure: Spark must not retry a lasting error.
                return error

        try:
            with watcher:
                outcomes = context.parallelize(tasks, max(1, len(tasks))).map(run_one).collect()
        except (Py4JJavaError, PySparkException) as error:
            if is_cancelled():
                raise UnavailableError("tiering on Spark was cancelled") from error
            raise UnavailableError(f"tiering on Spark failed: {_reason(error)}") from error
        finally:
            # Later jobs of this thread must not belong to this group.
            context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
        results = []
        for outcome in outcomes:
            if isinstance(outcome, StreamhouseError):
                raise outcome
            results.append(outcome)
        return results


class _Watcher:
    """Reports rows as tasks end, and cancels the job on request, from a thread."""

    def __init__(
        self,
        rows_written: Accumulator[int],
        *,
        on_rows: Callable[[int], None],
        is_cancelled: Callable[[], bool],
        cancel: Callable[[], None],
    ) -> None:
        self._rows_written = rows_written
        self._on_rows = on_rows
        self._is_cancelled = is_cancelled
        self._cancel = cancel
        self._reported = 0
        self._done = threading.Event()
        self._thread = NamedThread("tiering-spark", self._watch)

    def __enter__(self) -> _Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._report()

    def _watch(self) -> None:
        while not self._done.wait(_POLL_S):
            self._report()
            if self._is_cancelled():
                self._cancel()

    def _report(self) -> None:
        rows = self._rows_written.value - self._reported
        if rows > 0:
            self._reported += rows
            self._on_rows(rows)


def _reason(error: Py4JJavaError | PySparkException) -> str:
    """Return the line of a Spark error with the cause in the task."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("streamhouse.") and "Error:" in line]
    if ours:
        return ours[-1].partition("Error:")[2].strip()
    causes = [line for line in lines if "Exception:" in line or "Error:" in line]
    return (causes or lines or ["unknown"])[0][:500]
