"""Small calls, each beside a peer where one is installed: `make peers`.

Every line is measured in turns, so that what else the machine does hits all: our service, the peer
(pondra, without fsync), and the machine's own floor, an empty request and an fdatasync of a
kilobyte. `python -m benchmarks.bench_small_calls LINE ...` measures only those lines, each in
under 20 seconds. Tables have one bucket, the default, and the rows that are upserted exist and
change; ours are synced, with before images in the changelog. The lines with many writers are by
one client with many kept connections, which sends Arrow that was made before.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from benchmarks.consumer import Seen, following
from benchmarks.harness import (
    SCHEMA,
    changing_calls,
    make_rows,
    median,
    process_cpu_seconds,
    report,
)
from benchmarks.many_connections import Answers, get_rows, post_rows
from benchmarks.peers import pondra
from benchmarks.peers.pondra import Pondra, arrow_stream
from benchmarks.turns import Contender, Tally, calling, take_turns
from streamhouse.client import StorageClient
from tests.support.service_process import ServiceProcess

KEYED, LOG = "small_calls", "small_calls_log"
CONNECTIONS: Final = 32
LOOKUP_KEYS: Final = 100
PREPARED_CALLS: Final = 64
_AMOUNT: Final = SCHEMA.get_field_index("amount")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How long a line is measured: `turns` turns of `seconds` for each contender."""

    keys: int = 100_000
    turns: int = 5
    seconds: float = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What takes turns; `peer` is None where none is installed."""

    service: ServiceProcess
    client: StorageClient
    peer: Pondra | None
    sync: Callable[[], None]
    base: pa.RecordBatch
    sizes: Sizes

    def take_turns(self, **contenders: Contender | None) -> dict[str, Tally]:
        """Let those that are there take turns, with an empty request and a sync among them."""
        floor = {"empty": self.by_us(self.client.list_databases), "sync": _by_nobody(self.sync)}
        there = {name: contender for name, contender in contenders.items() if contender}
        return take_turns(there | floor, turns=self.sizes.turns, seconds=self.sizes.seconds)

    def by_us(self, call: Callable[[], object]) -> Contender:
        return replace(_by_nobody(call), pid=self.service.pid)

    def by_peer(self, call: Callable[[Pondra], object]) -> Contender | None:
        peer = self.peer
        return peer and replace(_by_nobody(lambda: call(peer)), pid=peer.pid)


def main() -> None:
    """Measure the lines named as arguments, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lines", nargs="*", metavar="LINE", help=f"of: {', '.join(LINES)}")
    parser.add_argument("--tiny", action="store_true", help="try whether it runs; figures are void")
    arguments = parser.parse_args()
    for name in arguments.lines:
        if name not in LINES:
            parser.error(f"there is no line '{name}'; there are {', '.join(LINES)}")
    sizes = Sizes(keys=20_000, turns=1, seconds=0.05) if arguments.tiny else Sizes()
    for name in arguments.lines or LINES:
        with _world(sizes) as world:
            LINES[name](world)


@contextlib.contextmanager
def _world(sizes: Sizes) -> Iterator[World]:
    """Both services, each with a keyed table of `sizes.keys` rows and an empty log table."""
    base = make_rows(sizes.keys)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        service = stack.enter_context(ServiceProcess(folder / "data"))
        client = stack.enter_context(StorageClient(service.endpoint))
        client.create_table(KEYED, SCHEMA, primary_key=["id"])
        client.create_table(LOG, SCHEMA)
        client.upsert(KEYED, pa.Table.from_batches([base]))
        peer = None
        if pondra.is_installed():
            peer = stack.enter_context(Pondra(folder / "peer"))
            peer.create_table(KEYED, SCHEMA, primary_key="id")
            peer.create_table(LOG, SCHEMA)
            peer.write(KEYED, pa.Table.from_batches([base]))
        probe = os.open(folder / "probe", os.O_WRONLY | os.O_CREAT)
        stack.callback(os.close, probe)

        def sync() -> None:
            os.write(probe, b"x" * 1_000)
            os.fdatasync(probe)

        yield World(service=service, client=client, peer=peer, sync=sync, base=base, sizes=sizes)


def _by_nobody(call: Callable[[], object]) -> Contender:
    def untimed() -> None:
        call()

    return Contender(run=calling(untimed))


# -- reads -------------------------------------------------------------------------------------


def lookup(world: World) -> None:
    """One key a call, each service by its own Python client."""
    keys = _random_keys(world)
    done = world.take_turns(
        ours=world.by_us(lambda: world.client.lookup_one(KEYED, id=next(keys))),
        peer=world.by_peer(lambda peer: peer.lookup_one(KEYED, next(keys))),
        kept=world.by_peer(lambda peer: peer.lookup_one_kept(KEYED, next(keys))),
    )
    ours, peer = done["ours"], done.get("peer")
    limit = peer or done["empty"]
    kept = f" (over a kept connection {done['kept'].rate:,.0f}/s)" if peer else ""
    report(
        "lookup of one key, Python client",
        measured=f"{ours.rate:,.0f}/s, {_times(ours)}",
        limit=f"{_who(peer)}: {limit.rate:,.0f}/s, {_times(limit)}{kept}",
        ratio=ours.rate / limit.rate,
        bar="at least the peer's rate",
        reached=peer and ours.rate >= peer.rate,
    )
    _report_client("lookup of one key", ours)


def lookup_100(world: World) -> None:
    """A hundred random keys a call."""
    # A list comes again after seconds only: the peer remembers what it has answered a query.
    shape = (20_000, LOOKUP_KEYS)
    asked = np.random.default_rng(3).integers(0, world.sizes.keys, shape)
    tables = (pa.table({"id": keys}) for keys in itertools.cycle(asked))
    lists = (keys.tolist() for keys in itertools.cycle(asked))
    done = world.take_turns(
        ours=world.by_us(lambda: world.client.lookup(KEYED, next(tables))),
        peer=world.by_peer(lambda peer: peer.lookup(KEYED, next(lists))),
    )
    ours, peer = done["ours"], done.get("peer")
    limit = peer or done["empty"]
    report(
        f"lookup of {LOOKUP_KEYS} keys a call",
        measured=f"{ours.rate * LOOKUP_KEYS / 1e3:,.1f} k keys/s, {_times(ours)}",
        limit=f"{_who(peer)}: {limit.rate * LOOKUP_KEYS / 1e3:,.1f} k keys/s, {_times(limit)}",
        ratio=ours.rate / limit.rate,
        bar="at least 100 k keys/s",
        reached=ours.rate * LOOKUP_KEYS >= 100_000,
    )


def get_32(world: World) -> None:
    """GET of one key over 32 connections."""
    ours: list[Answers] = []
    peers: list[Answers] = []
    service_s = client_s = 0.0
    for _ in range(world.sizes.turns):
        before_s, own_before_s = process_cpu_seconds(world.service.pid), time.process_time()
        ours.append(_get_rows(world, world.service.endpoint, f"/v1/tables/{KEYED}/rows/"))
        client_s += time.process_time() - own_before_s
        service_s += process_cpu_seconds(world.service.pid) - before_s
        if world.peer:
            peers.append(_get_rows(world, world.peer.endpoint, pondra.row_prefix(KEYED)))
    count = sum(answers.count for answers in ours)
    rate, p99_ms = median([a.rate for a in ours]), median([a.p99_ms for a in ours])
    limit, limit_text = 15_000.0, "the bar"
    if peers:
        limit = median([a.rate for a in peers])
        limit_text = (
            f"pondra: {limit / 1e3:,.1f} k/s, p99 {median([a.p99_ms for a in peers]):.1f} ms"
        )
    report(
        f"GET of one key, {CONNECTIONS} connections",
        measured=f"{rate / 1e3:,.1f} k/s, p99 {p99_ms:.1f} ms, processor a call: service"
        f" {service_s / count * 1e6:.0f} us, client {client_s / count * 1e6:.0f} us",
        limit=limit_text,
        ratio=rate / limit,
        bar="at least 15 k/s, and 0.9 of the peer",
        reached=rate >= 15_000 and (not peers or rate >= 0.9 * limit),
    )


def _get_rows(world: World, endpoint: str, prefix: str) -> Answers:
    return get_rows(
        endpoint,
        prefix,
        keys=world.sizes.keys,
        connections=CONNECTIONS,
        seconds=world.sizes.seconds,
    )


# -- upserts and appends, acknowledged -------------------------------------------------------------


def upsert_1(world: World) -> None:
    """One row a call: an acknowledged upsert may take what the peer's takes, and one fdatasync."""
    done, ours, peer = _upserts(world, 1)
    sync_ms = done["sync"].p50_ms
    limit = peer or done["empty"]
    report(
        "upsert of 1 row, acknowledged, p50",
        measured=_times(ours),
        limit=f"{_who(peer)} and an fdatasync: {limit.p50_ms:.2f} + {sync_ms:.2f} ms"
        f" ({_times(limit)})",
        ratio=ours.p50_ms / (limit.p50_ms + sync_ms),
        bar="at most the peer's and an fdatasync",
        reached=peer and ours.p50_ms <= peer.p50_ms + sync_ms,
    )
    _report_client("upsert of 1 row", ours)


def upsert_1000(world: World) -> None:
    """A thousand rows a call."""
    _report_large_upserts(world, 1_000, share=None)


def upsert_10000(world: World) -> None:
    """Ten thousand rows a call: 700 k rows/s where the peer makes 900 k."""
    _report_large_upserts(world, 10_000, share=700 / 900)


def _report_large_upserts(world: World, row_count: int, *, share: float | None) -> None:
    _, ours, peer = _upserts(world, row_count)
    rows_s = ours.rate * row_count
    bar_rows_s = {1_000: 200_000, 10_000: 700_000}[row_count]
    limit = peer.rate * row_count if peer else bar_rows_s
    is_reached = rows_s >= bar_rows_s or bool(peer and share and rows_s >= share * limit)
    report(
        f"upsert of {row_count:,} rows a call",
        measured=f"{rows_s / 1e3:,.0f} k rows/s, {_times(ours)}",
        limit=f"pondra: {limit / 1e3:,.0f} k rows/s, {_times(peer)}" if peer else "the bar",
        ratio=rows_s / limit,
        bar=f"at least {bar_rows_s / 1e3:.0f} k rows/s"
        + (f", or {share:.2f} of the peer" if share else ""),
        reached=is_reached,
    )


def _upserts(world: World, row_count: int) -> tuple[dict[str, Tally], Tally, Tally | None]:
    ours, its = _changes(world, row_count), _changes(world, row_count)
    done = world.take_turns(
        ours=world.by_us(lambda: world.client.upsert(KEYED, next(ours))),
        peer=world.by_peer(lambda peer: peer.write(KEYED, next(its))),
    )
    return done, done["ours"], done.get("peer")


def _changes(world: World, row_count: int) -> Iterator[pa.Table]:
    calls = changing_calls(world.base, row_count=row_count, call_count=2 * PREPARED_CALLS, seed=4)
    return itertools.cycle(calls)


# -- writes of many connections --------------------------------------------------------------------


def append_1_by_32(world: World) -> None:
    """One row a call."""
    calls = [_some_rows(world, 1, seed=writer) for writer in range(32)]
    _report_writers(world, "appends of 1 row, 32 writers", calls)


def append_100_by_16(world: World) -> None:
    """A hundred rows a call."""
    calls = [_some_rows(world, 100, seed=writer) for writer in range(16)]
    _report_writers(world, "appends of 100 rows, 16 writers", calls)


def _some_rows(world: World, row_count: int, *, seed: int) -> list[pa.Table]:
    starts = np.random.default_rng(seed).integers(0, world.sizes.keys - row_count, PREPARED_CALLS)
    rows = (world.base.slice(start, row_count) for start in starts.tolist())
    return [pa.Table.from_batches([batch]) for batch in rows]


def _report_writers(world: World, name: str, calls: Sequence[Sequence[pa.Table]]) -> None:
    """Let as many connections append as `calls` has lists."""
    bodies = [[arrow_stream(rows) for rows in own] for own in calls]

    def by(endpoint: str, paths: Sequence[Iterator[str]], pid: int) -> Contender:
        cycles = [itertools.cycle(own) for own in bodies]
        return Contender(
            run=lambda seconds: post_rows(endpoint, paths, cycles, seconds=seconds), pid=pid
        )

    path = f"/v1/tables/{LOG}/append"
    ours_paths = [itertools.repeat(path) for _ in bodies]
    contenders: dict[str, Contender | None] = {
        "ours": by(world.service.endpoint, ours_paths, world.service.pid)
    }
    if peer := world.peer:
        its_paths = [pondra.write_paths(LOG, producer=f"writer{n}") for n in range(len(bodies))]
        contenders["peer"] = by(peer.endpoint, its_paths, peer.pid)
    done = world.take_turns(**contenders)
    ours, its = done["ours"], done.get("peer")
    limit = its or done["empty"]
    report(
        name,
        measured=f"{ours.rate:,.0f} calls/s, {_times(ours)}",
        limit=f"{_who(its)}: {limit.rate:,.0f} calls/s, {_times(limit)}",
        ratio=ours.rate / limit.rate,
        bar="at least the peer's rate",
        reached=its and ours.rate >= its.rate,
    )


# -- rows on their way to a consumer ---------------------------------------------------------------


def upsert_to_consumer(world: World) -> None:
    """One upserted row, until the consumer of the changelog has it."""
    done = _to_consumers(world, KEYED, world.client.upsert)
    ours, peer = done["ours"], done.get("peer")
    sync_ms = done["sync"].p50_ms
    limit_ms = (peer or done["empty"]).p50_ms + sync_ms
    report(
        "upsert of 1 row to a consumer, p50",
        measured=_times(ours),
        limit=f"{_who(peer)} and an fdatasync: {limit_ms - sync_ms:.2f} + {sync_ms:.2f} ms",
        ratio=ours.p50_ms / limit_ms,
        bar="at most the peer's and an fdatasync",
        reached=peer and ours.p50_ms <= limit_ms,
    )


def append_to_subscriber(world: World) -> None:
    """One appended row, until the subscriber has it."""
    done = _to_consumers(world, LOG, world.client.append)
    ours, peer, empty, sync = done["ours"], done.get("peer"), done["empty"], done["sync"]
    limit_ms = empty.p50_ms + sync.p50_ms
    beside = f"; pondra: p50 {peer.p50_ms:.2f} ms" if peer else ""
    report(
        "append of 1 row to a subscriber, p50",
        measured=_times(ours),
        limit=f"an empty request and an fdatasync: {empty.p50_ms:.2f} + {sync.p50_ms:.2f} ms"
        + beside,
        ratio=ours.p50_ms / limit_ms,
        bar="at most 1.5",
        reached=ours.p50_ms <= 1.5 * limit_ms,
    )


def _to_consumers(
    world: World, table: str, write: Callable[[str, pa.Table], object]
) -> dict[str, Tally]:
    """Write a row, wait until the consumer has it, and so on; keys are random."""
    keys = _random_keys(world)
    ours_endpoint = world.service.endpoint
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(following("streamhouse", ours_endpoint, table))
        contenders: dict[str, Contender | None] = {
            "ours": Contender(
                run=calling(lambda: _seen_after(world, keys, ours, lambda r: write(table, r))),
                pid=world.service.pid,
            )
        }
        if peer := world.peer:
            # Its watch of a table without rows misses the first row.
            peer.write(table, pa.Table.from_batches([world.base.slice(0, 1)]))
            its = stack.enter_context(following("pondra", peer.endpoint, table))
            contenders["peer"] = Contender(
                run=calling(lambda: _seen_after(world, keys, its, lambda r: peer.write(table, r))),
                pid=peer.pid,
            )
        return world.take_turns(**contenders)


def _seen_after(
    world: World, keys: Iterator[int], seen: Seen, write: Callable[[pa.Table], object]
) -> float:
    row = world.base.slice(next(keys), 1)
    sent = time.perf_counter()
    write(
        pa.Table.from_batches([row.set_column(_AMOUNT, SCHEMA.field("amount"), pa.array([sent]))])
    )
    return seen.wait(sent)


# -- words -----------------------------------------------------------------------------------------


def _random_keys(world: World) -> Iterator[int]:
    return itertools.cycle(np.random.default_rng(5).integers(0, world.sizes.keys, 9_973).tolist())


def _times(tally: Tally) -> str:
    return f"p50 {tally.p50_ms:.2f} ms, p99 {tally.p99_ms:.1f} ms, {tally.processor}"


def _who(peer: Tally | None) -> str:
    return "pondra" if peer else "an empty request"


def _report_client(call: str, ours: Tally) -> None:
    report(
        f"processor of the client, {call}",
        measured=f"{ours.client_ms:.2f} ms",
        limit="the bar",
        ratio=ours.client_ms / 0.25,
        bar="at most 0.25 ms",
        reached=ours.client_ms <= 0.25,
    )


LINES: Final[dict[str, Callable[[World], None]]] = {
    line.__name__: line
    for line in (
        lookup,
        lookup_100,
        get_32,
        upsert_1,
        upsert_1000,
        upsert_10000,
        append_1_by_32,
        append_100_by_16,
        upsert_to_consumer,
        append_to_subscriber,
    )
}


if __name__ == "__main__":
    main()
