"""Which part gives way, and at what size: one line each, with the figure it follows from."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.scale.costs import (
    JournalSettings,
    ShardPlan,
    ceilings_mb_s,
    checkpoint_every_s,
    month_of_puts,
    puts_per_s,
    rounds_per_s,
    tiering_cores,
)
from benchmarks.scale.figures import (
    GETS_PER_S,
    PLAN_100K_AGAIN_S,
    PLAN_100K_S,
    ROUND_SERVICE_MS,
    ROUND_WORKER_MS,
    STORE,
    UPSERT_CALLS_PER_S,
)

__all__ = ["Limit", "limits"]

# What names there are for a plan of many shards: every table has a name in the directory.
_FILE_BYTES = 256e6
_NAMES_A_TABLE = 2  # made, and once moved or made again: names are never deleted


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One part: up to where it holds, and what is to be built there."""

    part: str
    gives_way_at: str
    figure: str
    next_design: str


def limits(settings: JournalSettings, plan: ShardPlan) -> list[Limit]:
    """Return the parts of a deployment in the order in which they give way."""
    return [
        _one_table(settings, plan),
        _planning(),
        _puts(settings, plan),
        _money(settings, plan),
        _catalog(plan),
        _rounds(plan),
        _directory(plan),
        _listing(settings, plan),
    ]


def _one_table(settings: JournalSettings, plan: ShardPlan) -> Limit:
    ceilings = ceilings_mb_s(settings, plan)
    name, least = min(ceilings.items(), key=lambda item: item[1])
    return Limit(
        part="one table",
        gives_way_at=f"{least:,.0f} MB/s on the machine assumed ({name}),"
        f" {ceilings['one process, ack `journal`']:,.0f} MB/s on a larger one;"
        f" {GETS_PER_S.value:,.0f} GETs/s, {UPSERT_CALLS_PER_S.value:,.0f} small upserts/s",
        figure="one process (`bench_append`, `bench_get_key`, `bench_small_upserts`)",
        next_design="[decision 22](decisions/0022-one-table-over-processes.md)",
    )


def _planning() -> Limit:
    a_file_s = PLAN_100K_S.value / 1e5
    files = round(10 / a_file_s, -4)
    return Limit(
        part="planning a read",
        gives_way_at=f"some {files:,.0f} files of one table, where the first plan of a process"
        f" takes 10 s: {files * _FILE_BYTES / 1e12:,.0f} TB in files of 256 MB",
        figure=f"100,000 files: {PLAN_100K_S.value} s, {PLAN_100K_AGAIN_S.value} s again"
        " (`bench_planning`); about linear",
        next_design="plan by manifest: read the list first, open only manifests whose bounds the"
        " predicate leaves, on executors from some 100 manifests on",
    )


def _directory(plan: ShardPlan) -> Limit:
    shards = 1_000
    names = shards * plan.tables * _NAMES_A_TABLE
    pages = names / STORE.list_keys
    reads = shards * plan.tables
    return Limit(
        part="the shard directory, read whole",
        gives_way_at=f"{reads:,} tables: a listing is {pages:,.0f} pages and"
        f" {pages * STORE.list_ms / 1e3:,.1f} s; without a cache a process reads {reads:,} objects,"
        f" {reads / STORE.gets_per_s:,.1f} s of the whole capacity of a partition",
        figure=f"{STORE.list_keys:,} names a page, {STORE.list_ms:.0f} ms; one object a name",
        next_design="a snapshot of the directory as one object, renewed by any process that"
        " finds the last snapshot old; names are then read from the snapshot on",
    )


def _puts(settings: JournalSettings, plan: ShardPlan) -> Limit:
    rate = puts_per_s(plan.load, settings)
    return Limit(
        part="PUTs of one partition of the bucket",
        gives_way_at=f"{STORE.puts_per_s / rate:,.0f} busy shards, until the store has split"
        f" `shards/`: the store answers 503 for minutes, journals wait, nothing is lost."
        f" 1,000 shards need {1_000 * rate / STORE.puts_per_s:,.0f} partitions",
        figure=f"{rate:,.0f} PUT/s a shard; {STORE.puts_per_s:,.0f} a partition, as S3 says",
        next_design="grow in steps, or a bucket (`--journal`) for every hundred shards; S3"
        " Express for journals with answers in milliseconds",
    )


def _listing(settings: JournalSettings, plan: ShardPlan) -> Limit:
    every_s = checkpoint_every_s(plan.load, settings)
    objects = 2 * every_s * puts_per_s(plan.load, settings)
    pages = objects / STORE.list_keys
    return Limit(
        part="listing a journal at a takeover",
        gives_way_at="not first: back to the older of two checkpoints there are"
        f" {objects:,.0f} objects, {pages:,.0f} pages, {pages * STORE.list_ms / 1e3:,.1f} s for a"
        " process without local data. A standby lists no objects",
        figure=f"a checkpoint every {settings.checkpoint_bytes / 2**20:,.0f} MiB, here"
        f" {every_s:,.0f} s, or {settings.checkpoint_s:,.0f} s",
        next_design="none needed; seals stay for ever, a small object an epoch",
    )


def _catalog(plan: ShardPlan) -> Limit:
    a_process = 1e3 / ROUND_SERVICE_MS.value
    shards = a_process / rounds_per_s(plan)
    return Limit(
        part="one catalog for all",
        gives_way_at=f"{a_process:,.0f} commits/s if a service commits for all shards"
        f" (`--catalog-access service`): {shards:,.0f} shards of {plan.tables} tables and"
        f" {plan.freshness_s:,.0f} s of freshness. A separate REST catalog: its own capacity",
        figure=f"{ROUND_SERVICE_MS.value:.0f} ms of the service's processor a round"
        " (`bench_freshness`)",
        next_design="rounds of several tables in one commit, if the catalog can commit many tables",
    )


def _rounds(plan: ShardPlan) -> Limit:
    a_core = 1e3 / ROUND_WORKER_MS.value
    shards = 1_000
    return Limit(
        part="tiering workers",
        gives_way_at=f"{a_core:,.0f} rounds/s a core; {shards:,} shards make"
        f" {shards * rounds_per_s(plan):,.0f} a second, and with their rows keep"
        f" {shards * tiering_cores(plan):,.0f} cores busy. A worker for every shard"
        f" makes {shards:,} requests a look",
        figure=f"{ROUND_WORKER_MS.value:.0f} ms a round (`bench_freshness`), rows a second and"
        " thread (`bench_tiering`)",
        next_design="give a worker some shards, not all (by `STREAMHOUSE_ENDPOINT`)",
    )


def _money(settings: JournalSettings, plan: ShardPlan) -> Limit:
    rate = puts_per_s(plan.load, settings)
    return Limit(
        part="money for PUTs",
        gives_way_at=f"{month_of_puts(rate):,.0f} dollars a month and busy shard; an idle one"
        " costs its lease",
        figure=f"one PUT a second is {month_of_puts(1):.2f} dollars a month",
        next_design="one object for several shards of a machine: the order of each stays in the"
        " object, the seal is the machine's. Fewer PUTs, coarser takeovers",
    )
