"""Runs the tasks of a round in threads of this process: pyarrow works outside the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import Any, TypeVar

from streamhouse.core.threads import Pool
from streamhouse.reading.tail.lake_task import SplitResult, TieringSplit, run_split
from streamhouse.tiering.tasks._rewrite_task import RewriteResult, RewriteTask, run_rewrite

__all__ = ["ThreadRunner"]

RunSplit = Callable[..., SplitResult]
_Result = TypeVar("_Result")


class ThreadRunner:
    """A `TaskRunner` of `parallelism` threads; by default one per core.

    After `run` no task of the call is running, also after an error.
    """

    def __init__(self, parallelism: int | None = None, *, run: RunSplit = run_split) -> None:
        self._parallelism = parallelism or max(1, os.cpu_count() or 1)
        self._run = run

    @property
    def parallelism(self) -> int:
        """How many tasks run at once."""
        return self._parallelism

    def run(
        self,
        splits: Sequence[TieringSplit],
        *,
        on_rows: Callable[[int], None],
        is_cancelled: Callable[[], bool],
    ) -> list[SplitResult]:
        """See `TaskRunner.run`; the first failure cancels the rest and is raised."""
        return self._map(self._run, splits, on_rows=on_rows, is_cancelled=is_cancelled)

    def rewrite(
        self,
        tasks: Sequence[RewriteTask],
        *,
        on_rows: Callable[[int], None],
        is_cancelled: Callable[[], bool],
    ) -> list[RewriteResult]:
        """See `TaskRunner.rewrite`; the first failure cancels the rest and is raised."""
        return self._map(run_rewrite, tasks, on_rows=on_rows, is_cancelled=is_cancelled)

    def _map(
        self,
        function: Callable[..., _Result],
        tasks: Sequence[Any],
        *,
        on_rows: Callable[[int], None],
        is_cancelled: Callable[[], bool],
    ) -> list[_Result]:
        errors: list[BaseException] = []

        def attempt(task: Any) -> _Result:
            if errors:
                raise errors[0]
            try:
                return function(
                    task, on_rows=on_rows, is_cancelled=lambda: bool(errors) or is_cancelled()
                )
            except BaseException as error:
                # Recorded here, not by the waiting caller: the next task must not begin meanwhile.
                errors.append(error)
                raise

        with Pool("tiering-task", self._parallelism) as pool:
            futures = [pool.submit(attempt, task) for task in tasks]
            wait(futures, return_when=FIRST_EXCEPTION)
            if errors:
                pool.shutdown(wait=True, cancel_futures=True)
                raise errors[0]
            return [future.result() for future in futures]
