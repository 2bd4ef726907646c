"""Waiting for a shard and taking the shard, on the event loop and one thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from streamhouse.core.errors import StorageFailedError, UnavailableError
from streamhouse.core.threads import Pool
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.ownership.journal.epochs import TakenByOtherError
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectStoreError,
    StoreRefusedError,
    StoreUnavailableError,
)
from streamhouse.storage_service.ownership.roles.role import Lag, Role, Standing
from streamhouse.storage_service.ownership.roles.shard_start import ShardStart
from streamhouse.storage_service.ownership.roles.standby import Standby, TakenOver

__all__ = ["ShardTaker"]

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_LOOKS_A_LEASE: Final = 10
_LOOK_S_MAX: Final = 1.0
_POLL_S_MIN: Final = 0.02
_POLL_S_MAX: Final = 0.25
_AWAY_S: Final = 1.0


class ShardTaker:
    """Waits, follows and takes; `close` ends the following."""

    def __init__(
        self,
        config: ServiceConfig,
        directory: DataDirectory,
        *,
        endpoint: str,
        standing: Standing,
        on_standby: Callable[[], None],
    ) -> None:
        self._config = config
        self._directory = directory
        self._endpoint = endpoint
        self._standing = standing
        self._on_standby = on_standby
        self._stop = threading.Event()
        self._thread = Pool("journal-follow", 1)
        self._look_s = min(config.lease_ms / 1_000 / _LOOKS_A_LEASE, _LOOK_S_MAX)
        self._standby: Standby | None = None

    async def take(self) -> tuple[ShardStart, TakenOver]:
        """Return once this process owns the shard and the directory equals the journal.

        Raises `UnavailableError` if another process owns the shard and this process is no standby.
        """
        try:
            if self._config.is_standby:
                # A standby survives failures of other processes: a full store is no reason to end.
                self._standing.role = Role.STANDBY
                start = await self._while_away(self._opened)
                return start, await self._take_over(start)
            start = await self._run(self._opened)
            return start, await self._take_alone(start)
        except ObjectStoreError as error:
            raise UnavailableError(
                f"the journal {self._config.journal_url} cannot be used: {error}"
            ) from error
        except OSError as error:
            raise StorageFailedError(
                f"{self._config.data_dir} cannot become what the journal says: {error}"
            ) from error

    async def close(self) -> None:
        """Stop waiting; called after `take` has ended or was cancelled. Idempotent."""
        self._stop.set()
        standby, self._standby = self._standby, None
        if standby is not None:
            await self._run(standby.close)
        self._thread.shutdown()

    def _opened(self) -> ShardStart:
        return ShardStart(
            self._config,
            self._directory,
            endpoint=self._endpoint,
            standing=self._standing,
            stop=self._stop,
        )

    async def _take_alone(self, start: ShardStart) -> TakenOver:
        await self._while_away(start.look)
        seen = start.sign_of_life
        await self._run(start.note_whose_it_was)
        while not (start.has_run_out or await self._run(start.may_take_now)):
            await asyncio.sleep(self._look_s)
            await self._while_away(start.look)
            if start.sign_of_life != seen:
                raise start.owned_elsewhere()
        self._standing.role, self._standing.owner = Role.RESTORING, None
        await self._run(start.prepare)
        try:
            epoch = start.newest_epoch
            shard = await self._run(lambda: start.take(after=epoch))
        except TakenByOtherError as error:
            raise start.owned_elsewhere() from error
        begun = await self._while_away(
            lambda: start.begin(epoch=shard.epoch, service_id=shard.service_id)
        )
        return TakenOver(shard, begun)

    async def _take_over(self, start: ShardStart) -> TakenOver:
        standing = self._standing
        self._standby = standby = Standby(
            self._config, self._directory, start, standing.tables, standing.logs
        )
        # The first restore may take minutes.
        standing.lag = standby.lag()
        await self._while_away(start.look)
        self._on_standby()
        looking = asyncio.ensure_future(asyncio.sleep(0))
        pause_s = _POLL_S_MIN
        while True:
            is_more = await self._while_away(standby.follow)
            if looking.done():
                await self._while_away(start.look)
                # A standby without new objects needs no further request for its lag.
                lag = standby.caught_up_lag
                standing.lag = await self._while_away(standby.lag) if lag is None else lag
                looking = asyncio.ensure_future(asyncio.sleep(self._look_s))
            if not is_more and standby.may_take_now:
                takeover = await self._take_from(standby)
                if takeover is not None:
                    standing.lag = Lag()
                    return takeover
            pause_s = _POLL_S_MIN if is_more else min(pause_s * 2, _POLL_S_MAX)
            if not is_more and await self._is_needed_within(pause_s):
                pause_s = _POLL_S_MIN / 2

    async def _is_needed_within(self, pause_s: float) -> bool:
        """Return after a pause, or as soon as a request waits for further changes."""
        is_needed = self._standing.is_needed
        try:
            async with asyncio.timeout(pause_s):
                await is_needed.wait()
        except TimeoutError:
            return False
        is_needed.clear()
        return True

    async def _take_from(self, standby: Standby) -> TakenOver | None:
        standing = self._standing
        standing.role = Role.RESTORING
        try:
            return await self._while_away(standby.take)
        except TakenByOtherError as error:
            _logger.info("event=taken_by_other why='%s'", error)
            standing.role = Role.STANDBY
            await self._while_away(standby.start.look)
            return None

    async def _while_away(self, function: Callable[[], _T]) -> _T:
        """Repeat a call until the store answers."""
        while True:
            try:
                return await self._run(function)
            except (StoreRefusedError, StoreUnavailableError) as error:
                _logger.warning("event=journal_store_failed error='%s'", error)
                await asyncio.sleep(_AWAY_S)

    def _run(self, function: Callable[..., _T], *args: Any) -> Awaitable[_T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
