"""Kill the service and its tiering worker again and again, and judge what is left. A program:

    python -m tests.torture.torture --minutes 60 [--seed N]

The run is made of eras: a fresh directory, some tables, writers of every kind, and a number of
lives of the service. A life ends by kill -9, at a random instant or at a named step
(`doomed_service.SERVICE_STEPS`), by SIGTERM, or after its disk failed (deaths.py). After each
restart every table is judged against the history its writers kept (checkers.py), first while
interrupted calls still land, then again when all is quiet. Two tiering workers run beside it,
killed at their steps. Some directories are checked as they were left. At the end of an era
everything is tiered and the lake is judged too.

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
from pathlib import Path
from typing import Final

from tests.torture.era import Era, Report

__all__ = ["torture"]

LIVES_PER_ERA: Final = 12


def torture(*, seed: int, seconds: float, lives_per_era: int = LIVES_PER_ERA) -> Report:
    """Run for at least `seconds`; raises AssertionError at the first violation, naming the seed."""
    report = Report(seed)
    started_s = time.monotonic()
    while not report.eras or time.monotonic() - started_s < seconds:
        era = random.Random(f"{seed}/{report.eras}")
        directory = Path(tempfile.mkdtemp(prefix="streamhouse-torture-"))
        try:
            Era(directory, era, report).run(lives_per_era)
        except BaseException:
            sys.stderr.write(f"seed {seed}, era {report.eras}: {directory} is kept\n")
            raise
        shutil.rmtree(directory)
        report.eras += 1
        report.seconds = time.monotonic() - started_s
        sys.stderr.write(report.text() + "\n")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description="Torture the service; see this module's text.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="default: drawn, and printed")
    given = parser.parse_args()
    seed = secrets.randbits(32) if given.seed is None else given.seed
    sys.stderr.write(f"seed {seed}\n")
    report = torture(seed=seed, seconds=given.minutes * 60)
    sys.stdout.write(report.text() + "\n")
    for who, deaths in (("service", report.deaths), ("tiering worker", report.worker_deaths)):
        for kind, count in sorted(deaths.items()):
            sys.stdout.write(f"  {who}, {kind}: {count}\n")


if __name__ == "__main__":
    main()
