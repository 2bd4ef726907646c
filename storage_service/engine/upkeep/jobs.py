"""The service's repeated work: one list of jobs, started and stopped together.

A failed look is logged and repeated at the next due time: no job ends before the service. Event
loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from streamhouse.core.errors import StreamhouseError
from streamhouse.storage_service.config import ServiceConfig

__all__ = ["Job", "Upkeep", "upkeep_jobs"]

_logger = logging.getLogger(__name__)

Look: TypeAlias = Callable[[], Awaitable[None]]

# Often beside the shortest time-outs that make sense, which are minutes.
_TRANSACTION_TIMEOUTS_MS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Calls `look` `every_ms` after the end of the last look; with `is_eager` at the start, too."""

    name: str
    every_ms: float
    look: Look
    is_eager: bool = False


def upkeep_jobs(
    config: ServiceConfig,
    *,
    retention: Look,
    row_expiry: Look,
    mending: Look,
    transaction_timeouts: Look,
    disk_budget: Look,
) -> list[Job]:
    """Return the jobs of the tables with their intervals."""
    every_ms = config.retention_interval_ms
    return [
        Job(name="retention", every_ms=every_ms, look=retention),
        Job(name="row_expiry", every_ms=every_ms, look=row_expiry),
        Job(name="mending", every_ms=every_ms, look=mending),
        Job(
            name="transaction_timeouts",
            every_ms=_TRANSACTION_TIMEOUTS_MS,
            look=transaction_timeouts,
        ),
        Job(
            name="disk_budget",
            every_ms=config.disk_check_interval_ms,
            look=disk_budget,
            is_eager=True,
        ),
    ]


class Upkeep:
    """The jobs of one service."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, jobs: Iterable[Job]) -> None:
        """Add these jobs and run them until `stop`."""
        self._tasks.extend(asyncio.ensure_future(_repeat(job)) for job in jobs)

    async def stop(self) -> None:
        """Interrupt all jobs; after the return no job touches the tables."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _repeat(job: Job) -> None:
    if job.is_eager:
        await _look(job)
    while True:
        await asyncio.sleep(job.every_ms / 1000)
        await _look(job)


async def _look(job: Job) -> None:
    try:
        await job.look()
    except StreamhouseError as error:
        _logger.warning("event=job_failed job=%s why=%r", job.name, error.message)
    except Exception as error:  # outermost loop: the other jobs, and the next look, go on
        _logger.error("event=bug job=%s", job.name, exc_info=error)
