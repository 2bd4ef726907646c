"""What a journal and a shard cost a month: formulas, no numbers of their own but assumptions.

PUT a second, of a journal whose writer sends what has lingered or is a megabyte, at once if nothing
is on its way, and has at most k objects in flight (t: how long storing one takes):

    min(k / t, max(1 / (w + 1 / calls), bytes / 1 MiB))      w: the linger, or t if that is shorter
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from benchmarks.scale.figures import (
    ACK_JOURNAL_SHARE,
    APPEND_MB_S,
    INSTANCE,
    PRICES,
    ROUND_SERVICE_MS,
    ROUND_WORKER_MS,
    ROW_BYTES,
    STORE,
    TIERING_ROWS_PER_S,
)
from streamhouse.storage_service.ownership.journal._writer import WriterOptions

__all__ = [
    "ASKED_TO_FOLLOW",
    "DEFAULTS",
    "PLANNED",
    "PLANNED_MB_S",
    "SHARD",
    "JournalSettings",
    "Load",
    "MonthlyCost",
    "ShardPlan",
    "ceilings_mb_s",
    "checkpoint_every_s",
    "idle_month",
    "lease_puts_per_s",
    "month_of_puts",
    "monthly_cost",
    "puts_per_s",
    "storage_month",
    "tiering_cores",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSettings:
    """The options of `serve` that decide how many objects there are, and the intervals beside."""

    linger_ms: float
    send_at_bytes: float  # what waits is sent at once from here on
    object_bytes_max: float
    in_flight_max: int
    lease_ms: float
    lease_renewals: int  # in one lease time
    idle_look_s: float  # how often an idle owner looks at its next place, a standby at the lease
    follow_s: float  # how often a standby looks for the next object
    checkpoint_s: float
    checkpoint_bytes: float  # journalled, and it is time for one
    pack_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What arrives at one shard: calls that change something, and their bytes."""

    calls_per_s: float
    mb_per_s: float


_WRITER: Final = WriterOptions()
_LINGER_MS: Final = 2  # that of `serve`
DEFAULTS: Final = JournalSettings(
    linger_ms=_LINGER_MS,
    send_at_bytes=1 << 20,
    object_bytes_max=8 << 20,
    in_flight_max=_WRITER.in_flight_max,
    lease_ms=10_000,
    lease_renewals=3,
    idle_look_s=1,
    follow_s=0.25,
    checkpoint_s=300,
    checkpoint_bytes=512 << 20,
    pack_bytes=32 << 20,
)

# What a shard of many is planned with where PUTs cost money: a third of the objects.
PLANNED: Final = dataclasses.replace(DEFAULTS, linger_ms=20)

# What a shard is planned to take: two thirds of what the network of its machine guarantees, see
# `ceilings_mb_s`.
PLANNED_MB_S: Final = 40.0
ASKED_TO_FOLLOW: Final = 2
"""What a standby asks to know that there is nothing more: the next object, and the next epoch."""


def puts_per_s(load: Load, settings: JournalSettings) -> float:
    """Return the journal objects a second."""
    if load.calls_per_s <= 0:
        return 0.0
    rate = 1 / STORE.put_seconds(0)
    # The time of a PUT grows with the object, and the object with the time: a few rounds settle it.
    for _ in range(60):
        put_s = STORE.put_seconds(min(load.mb_per_s * 1e6 / rate, settings.object_bytes_max))
        wait_s = min(settings.linger_ms / 1e3, put_s) + 1 / load.calls_per_s
        offered = max(1 / wait_s, load.mb_per_s * 1e6 / settings.send_at_bytes)
        rate = (rate + min(offered, settings.in_flight_max / put_s, load.calls_per_s)) / 2
    return rate


def month_of_puts(rate: float) -> float:
    """Return the dollars a month of so many PUTs a second."""
    return rate * PRICES.put * PRICES.seconds_a_month


def lease_puts_per_s(settings: JournalSettings) -> float:
    """Return how often an owner renews its lease."""
    return settings.lease_renewals / (settings.lease_ms / 1e3)


def storage_month(byte_count: float) -> float:
    """Return the dollars a month of so many bytes in one account."""
    dollars, left = 0.0, byte_count / 1e9
    for step_gb, price in PRICES.storage_steps:
        taken = min(left, step_gb)
        dollars += taken * price
        left -= taken
    return dollars


def checkpoint_every_s(load: Load, settings: JournalSettings) -> float:
    """Return the time from checkpoint to checkpoint: after so much time, or so many bytes."""
    return min(settings.checkpoint_s, settings.checkpoint_bytes / max(load.mb_per_s * 1e6, 1))


def idle_month(settings: JournalSettings) -> float:
    """Return the dollars a month of an idle shard's lease and looks, and its standby's."""
    # Both look once: the owner at its next place, the standby at the lease, after listing epochs.
    gets = 2 / settings.idle_look_s + ASKED_TO_FOLLOW / settings.follow_s
    puts = lease_puts_per_s(settings) + 1 / settings.idle_look_s
    return month_of_puts(puts) + gets * PRICES.get * PRICES.seconds_a_month


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """What is assumed of one shard that is used well."""

    load: Load
    readers: int = 1  # live readers of every row, beside tiering
    tables: int = 10
    buckets: int = 4
    freshness_s: float = 60
    files_a_round: int = 8  # PUTs: one data file a bucket, manifest, list, metadata, table state
    standby: bool = True
    lake_bytes: float = 3e12
    log_bytes: float = 500e9


SHARD: Final = ShardPlan(load=Load(calls_per_s=800, mb_per_s=PLANNED_MB_S))


def ceilings_mb_s(settings: JournalSettings, plan: ShardPlan) -> dict[str, float]:
    """Return what each part of one shard lets through, in MB/s of rows."""
    # Out of the machine goes every byte once to the journal, to tiering, to each reader and to a
    # checkpoint; the service reads none of it again from the store.
    out = 3 + plan.readers
    full = settings.object_bytes_max
    return {
        "one process, ack `journal`": APPEND_MB_S.value * ACK_JOURNAL_SHARE,
        "the journal's objects in flight": settings.in_flight_max
        * full
        / STORE.put_seconds(full)
        / 1e6,
        "the network of its machine, outwards": INSTANCE.network_mb_s / out,
    }


def tiering_cores(plan: ShardPlan) -> float:
    """Return the cores that tiering one shard keeps busy: by rows, or by rounds."""
    by_rows = plan.load.mb_per_s * 1e6 / ROW_BYTES / TIERING_ROWS_PER_S.value
    return by_rows + rounds_per_s(plan) * ROUND_WORKER_MS.value / 1e3


def rounds_per_s(plan: ShardPlan) -> float:
    """Return the tiering rounds a second of one shard."""
    return plan.tables / plan.freshness_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MonthlyCost:
    """Dollars a month, of one shard or of many."""

    machines: float
    tiering: float
    journal_puts: float
    other_requests: float
    journal_storage: float
    lake_storage: float
    cross_zone: float

    @property
    def service(self) -> float:
        """All but the lake's bytes and the clients' way to another zone."""
        parts = (self.machines, self.tiering, self.journal_puts, self.other_requests)
        return sum(parts) + self.journal_storage


def monthly_cost(shards: int, settings: JournalSettings, plan: ShardPlan) -> MonthlyCost:
    """Return what so many shards of one plan cost a month."""
    journal = puts_per_s(plan.load, settings)
    lake_puts = rounds_per_s(plan) * plan.files_a_round
    # A checkpoint uploads what is new in packs, a few small ones and its manifest, and rolls.
    every_s = checkpoint_every_s(plan.load, settings)
    packs = plan.load.mb_per_s * 1e6 / settings.pack_bytes + 6 / every_s
    puts = lease_puts_per_s(settings) + lake_puts + packs
    gets = 0.0
    if plan.standby:
        # It reads every object, looks whether there is another, and at lease and epochs. Who has
        # found nothing more is not behind, and lists nothing to know that.
        gets = journal + ASKED_TO_FOLLOW / settings.follow_s + 1 / settings.idle_look_s
        puts += 1 / settings.idle_look_s
    hours = shards * PRICES.hours_a_month
    # Two checkpoints back, then the objects go.
    journal_bytes = 2 * every_s * plan.load.mb_per_s * 1e6 + plan.log_bytes
    gigabytes = plan.load.mb_per_s * 1e6 * PRICES.seconds_a_month / 1e9
    stored = shards * plan.lake_bytes
    return MonthlyCost(
        machines=hours * INSTANCE.dollars_an_hour * (2 if plan.standby else 1),
        tiering=hours * tiering_cores(plan) * INSTANCE.dollars_an_hour / INSTANCE.cores,
        journal_puts=shards * month_of_puts(journal),
        other_requests=shards * (month_of_puts(puts) + gets * PRICES.get * PRICES.seconds_a_month),
        journal_storage=storage_month(stored + shards * journal_bytes) - storage_month(stored),
        lake_storage=storage_month(stored),
        cross_zone=shards * gigabytes * 2 / 3 * PRICES.cross_zone_gb,
    )


def service_cores_of_rounds(plan: ShardPlan) -> float:
    """Return what of a core of the service its own tiering rounds take."""
    return rounds_per_s(plan) * ROUND_SERVICE_MS.value / 1e3
