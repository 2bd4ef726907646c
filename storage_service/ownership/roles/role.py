"""What a process with a journal is to its shard, and what it knows of the one that owns it.

    waiting ----.
                v
    standby -> restoring -> owner -> (ended: a clean stop, or fenced)
       ^          |
       '----------'   another process was quicker

Everything here is read and changed on the event loop, but for `lag`, which is one value that
whoever follows the journal replaces.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric

from streamhouse.core.errors import NotOwnerError
from streamhouse.storage_service.ownership.roles._boot_clock import boot_clock_s
from streamhouse.storage_service.ownership.roles._journal_metrics import JournalMetrics

__all__ = ["Lag", "Role", "Standing"]


class Role(enum.StrEnum):
    """Only an owner answers about the data."""

    WAITING = "waiting"
    """Somebody else owned the shard a moment ago, and this process sees whether they are alive."""
    STANDBY = "standby"
    """Somebody else owns it; this process follows, to take over when they are gone."""
    RESTORING = "restoring"
    """This process has taken the shard, and completes its directory."""
    OWNER = "owner"
    """It answers about the data, until it stops or ends at once because somebody took the shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How far behind the journal a standby is, as far as it has seen the journal."""

    objects: int = 0
    """Stored and not applied; each is a group of operations."""
    since_s: float | None = None
    """When the journal was last seen to its end, by `boot_clock_s`; None: it is not followed."""

    @property
    def ms(self) -> int:
        """How long ago that was. It grows by itself: a standby that is stuck cannot say so."""
        return 0 if self.since_s is None else round(1_000 * (boot_clock_s() - self.since_s))


class Standing:
    """The role of this process at the moment."""

    def __init__(self, shard: str) -> None:
        self.shard = shard
        self.role = Role.WAITING
        self.owner: str | None = None
        """Where the owner answers, if it is another process and has said so."""
        self.service_id: str | None = None
        """Of which service the shard is, once that was read."""
        self.lag = Lag()
        self.journal = JournalMetrics()
        """Of the owner's own journal."""

    def not_owner(self) -> NotOwnerError:
        """Return what everybody is told who asks about the data."""
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
