"""A process's role for a shard, and the shard's owner.

    waiting ----.
                v
    standby -> restoring -> owner -> (ended: a clean stop, or fenced)
       ^          |
       '----------'   another process was quicker

Everything here is used on the event loop. The following thread replaces `lag`, one value, and
changes `tables` and `logs`.
"""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric

from streamhouse.core.errors import NotOwnerError
from streamhouse.storage_service.engine.followed.followed_logs import LogTables
from streamhouse.storage_service.engine.keys.warm_tables import WarmTables
from streamhouse.storage_service.ownership.roles._journal_metrics import JournalMetrics
from streamhouse.storage_service.ownership.roles.boot_clock import boot_clock_s

__all__ = ["Lag", "Role", "Standing"]


class Role(enum.StrEnum):
    """Only an owner answers about the data, besides lookups and fetches that take a standby's."""

    WAITING = "waiting"
    """Another process owned the shard a moment ago; this process checks for signs of life."""
    STANDBY = "standby"
    """Another process owns the shard; this process follows, to take over."""
    RESTORING = "restoring"
    """This process has taken the shard, and completes its directory."""
    OWNER = "owner"
    """This process answers about the data, until it stops or another process takes the shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """A standby's lag behind the journal, as far as seen."""

    objects: int = 0
    """Objects stored and not applied; each is a group of operations."""
    since_s: float | None = None
    """The time of `boot_clock_s` when all was last applied; None without following."""

    @property
    def ms(self) -> int:
        """Milliseconds since then. The value grows by itself: a stuck standby cannot report."""
        return 0 if self.since_s is None else round(1_000 * (boot_clock_s() - self.since_s))


class Standing:
    """The current role of this process."""

    def __init__(self, shard: str) -> None:
        self.shard = shard
        self.role = Role.WAITING
        self.owner: str | None = None
        """The other owner's endpoint, if known."""
        self.service_id: str | None = None
        """The id of the shard's service, once read."""
        self.lag = Lag()
        self.tables = WarmTables()
        """The primary key tables that a standby follows."""
        self.logs = LogTables()
        """The tables whose logs a standby follows."""
        self.is_needed = asyncio.Event()
        """Set while a request waits for changes that a standby has not applied."""
        self.journal = JournalMetrics()
        """Metrics of the owner's own journal."""

    def not_owner(self) -> NotOwnerError:
        """Return the error for requests about the data."""
        if self.role is Role.OWNER:
            return NotOwnerError(
                f"the lease of this process on shard '{self.shard}' has run out: another process"
                " may own it by now"
            )
        where = "" if self.owner is None else f"; its owner answers at {self.owner}"
        return NotOwnerError(
            f"this process is {self.role} and does not own shard '{self.shard}'{where}",
            owner=self.owner,
        )

    def metrics(self) -> list[Metric]:
        """Return role, lag and the owner's journal, for Prometheus."""
        roles = GaugeMetricFamily(
            "streamhouse_role",
            "1 for the role this process has for its shard.",
            labels=["shard", "role"],
        )
        for role in Role:
            roles.add_metric([self.shard, role], role is self.role)
        return [
            roles,
            GaugeMetricFamily(
                "streamhouse_standby_lag_objects",
                "Objects of the journal that a standby has seen and not applied.",
                value=self.lag.objects,
            ),
            GaugeMetricFamily(
                "streamhouse_standby_lag_seconds",
                "Time since a standby had applied all there was of the journal.",
                value=self.lag.ms / 1000,
            ),
            *self.journal.read(),
        ]
