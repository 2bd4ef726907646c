"""Kill the service and its tiering worker again and again, and judge what is left. A program:

    python -m tests.torture.torture --minutes 60 [--seed N] [--eras disk,lost-disk,takeover]

The run is made of eras: a fresh directory, some tables, writers of every kind, and a number of
lives of the service. A life ends by kill -9, at a random instant or at a named step
(`doomed_service.SERVICE_STEPS`), by SIGTERM, or after its disk failed (deaths.py). After each
restart every table is judged against the history its writers kept (checkers.py), first while
interrupted calls still land, then again when all is quiet. Two tiering workers run beside it,
killed at their steps. Some directories are checked as they were left. At the end of an era
everything is tiered and the lake is judged too.

Meanwhile a table is dropped and made again under those who hold positions of it
(held_positions.py), and other engines commit to the lake (outside.py).

An era of kind `disk` is of one machine that keeps its disk. Those of journal/eras.py have a journal
in a store that misbehaves: in `lost-disk` the machine's disk is gone after every other death, in
`takeover` a standby takes over from an owner that was killed, paused, stopped, or lost with its
disk; lookups meanwhile are judged to be linearizable. In `disk-ack` (journal/disk_ack.py) what a
lost disk takes is held against what may be lost then. In `shards` (journal/shards.py) one
supervisor has two shards, tables move between them, and any of the three processes dies. In
`kafka` (journal/kafka.py) who writes and reads are Kafka clients. In `readers` (readers.py) readers
beside an owner answer lookups, any of them killed or paused; lookups are judged to be linearizable.
In `standbys` (journal/standbys.py) clients read from an owner and two standbys by turns.

The seed decides what is killed when and what is written; threads and disks still add chance of
their own, so a seed repeats the plan of a run, not each of its interleavings.
"""

from __future__ import annotations

import argparse
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.support.journal_machines import JournalHome, StoreKind
from tests.support.python_process import fork_from_now_on
from tests.torture.era import Era, Report
from tests.torture.journal.disk_ack import DiskAckEra
from tests.torture.journal.eras import LostDiskEra, TakeoverEra
from tests.torture.journal.kafka import KafkaEra
from tests.torture.journal.shards import ShardsEra
from tests.torture.journal.standbys import StandbysEra
from tests.torture.readers import ReaderEra

__all__ = ["KINDS", "torture"]

LIVES_PER_ERA: Final = 12
KINDS: Final = (
    *("disk", "lost-disk", "takeover", "disk-ack", "shards", "kafka", "readers", "standbys"),
)
_STORES: Final[tuple[StoreKind, ...]] = ("faulty s3", "faulty s3", "file")
_JournalEra = LostDiskEra | TakeoverEra | DiskAckEra | ShardsEra | StandbysEra
_WITHOUT_JOURNAL: Final[dict[str, type[Era | ReaderEra]]] = {
    "disk": Era,
    "readers": ReaderEra,
}
_OF_JOURNAL: Final[dict[str, type[_JournalEra]]] = {
    "lost-disk": LostDiskEra,
    "takeover": TakeoverEra,
    "disk-ack": DiskAckEra,
    "shards": ShardsEra,
    "kafka": KafkaEra,
    "standbys": StandbysEra,
}


def torture(
    *,
    seed: int,
    seconds: float,
    lives_per_era: int = LIVES_PER_ERA,
    kinds: Sequence[str] = KINDS,
    stores: Sequence[StoreKind] = _STORES,
) -> Report:
    """Run for at least `seconds`, eras of these kinds in turn, each on a store that is drawn.

    Raises AssertionError at the first violation, naming the seed.
    """
    report = Report(seed)
    started_s = time.monotonic()
    while not report.eras or time.monotonic() - started_s < seconds:
        era = random.Random(f"{seed}/{report.eras}")
        directory = Path(tempfile.mkdtemp(prefix="streamhouse-torture-"))
        try:
            kind = kinds[report.eras % len(kinds)]
            _run(kind, era.choice(stores), directory, era, report, lives_per_era)
        except BaseException:
            sys.stderr.write(f"seed {seed}, era {report.eras}: {directory} is kept\n")
            raise
        shutil.rmtree(directory)
        report.eras += 1
        report.seconds = time.monotonic() - started_s
        sys.stderr.write(report.text() + "\n")
    return report


def _run(
    kind: str, store: StoreKind, directory: Path, chance: random.Random, report: Report, lives: int
) -> None:
    if kind in _WITHOUT_JOURNAL:
        _WITHOUT_JOURNAL[kind](directory, chance, report).run(lives)
        return
    seed = chance.getrandbits(32)
    with JournalHome(store, seed=seed, folder=directory / "home") as home:
        era = _OF_JOURNAL[kind](directory, chance, report, home)
        try:
            era.run(lives)
        except BaseException:
            sys.stderr.write(f"an era of kind {kind}, on {store}\n")
            if home.store is not None:
                home.store.copy_to(directory / "bucket")
            raise


def main() -> None:
    parser = argparse.ArgumentParser(description="Torture the service; see this module's text.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="default: drawn, and printed")
    parser.add_argument(
        "--eras", default=",".join(KINDS), help="which kinds, in turn; default: %(default)s"
    )
    given = parser.parse_args()
    kinds = given.eras.split(",")
    if not set(kinds) <= set(KINDS):
        parser.error(f"--eras takes some of {','.join(KINDS)}")
    # A service that starts in a tenth of a second dies more often in an hour.
    fork_from_now_on()
    seed = secrets.randbits(32) if given.seed is None else given.seed
    sys.stderr.write(f"seed {seed}\n")
    report = torture(seed=seed, seconds=given.minutes * 60, kinds=kinds)
    sys.stdout.write(report.text() + "\n")
    met = (
        ("service", report.deaths),
        ("tiering worker", report.worker_deaths),
        ("store", report.store_faults),
        ("other engines", report.outside),
        ("positions in dropped tables", report.positions),
        ("standbys, answered", report.standby_answers),
    )
    for who, deaths in met:
        for kind, count in sorted(deaths.items()):
            sys.stdout.write(f"  {who}, {kind}: {count}\n")


if __name__ == "__main__":
    main()
