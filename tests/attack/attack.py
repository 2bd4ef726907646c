"""Attack a service from outside: its files, its requests, its callers. A program:

    python -m tests.attack.attack --minutes 30 [--seed N] [--case K] [--kinds "segment,table.json"]

One part damages the files of a data directory, of every kind, in every way that time, disks and
people do it, and judges every table against the rows that were acknowledged (directories.py). The
other sends hostile requests to every route, as every kind of caller (requests.py). Any answer that
is not right is a violation, as is a refusal without a sentence. The seed decides everything but
the order in which threads run.
"""

from __future__ import annotations

import argparse
import random
import secrets
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.attack.directories import DirectoryReport, attack_directory
from tests.attack.judge import Violation
from tests.attack.requests import RequestReport, attack_requests
from tests.attack.world import build_world
from tests.support.python_process import end_forking, fork_from_now_on

__all__ = ["Report", "attack"]

_CASES_PER_REQUESTS: Final = 100


@dataclass
class Report:
    """What an attack did, and what it found."""

    directories: DirectoryReport = field(default_factory=DirectoryReport)
    requests: RequestReport = field(default_factory=RequestReport)
    violations: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the report for people."""
        found = f"{len(self.violations)} VIOLATIONS" if self.violations else "no violation"
        first = (
            f"{self.directories.cases} damages, {self.directories.answers:,} answers judged,"
            f" {self.requests.requests:,} hostile requests: {found}"
        )
        return "\n".join(
            [first, *self.directories.lines(), *self.requests.lines(), *self.violations]
        )


def attack(
    *,
    seed: int,
    seconds: float,
    first_case: int = 0,
    cases_min: int = 1,
    requests_each: int = 40,
    kinds: set[str] | None = None,
    goes_on: bool = False,
) -> Report:
    """Attack for at least `seconds`; raises `Violation` at the first one, or, with `goes_on`,
    says it and attacks on. `kinds` of files limits it to directories."""
    report = Report()
    place = Path(tempfile.mkdtemp(prefix="streamhouse-attack-"))
    started_s = time.monotonic()
    world = build_world(place / "world")
    case = first_case
    while case < first_case + cases_min or time.monotonic() - started_s < seconds:
        try:
            if kinds is None and (case - first_case) % _CASES_PER_REQUESTS == 0:
                chance = random.Random(f"{seed}/requests/{case}")
                attack_requests(place / f"requests-{case}", chance, report.requests, requests_each)
            # Each case has its own seed, so that one can be run again alone.
            chance = random.Random(f"{seed}/{case}")
            attack_directory(world, chance, report.directories, kinds)
        except Violation as violation:
            found = f"seed {seed}, case {case}: {violation}"
            if not goes_on:
                sys.stderr.write(f"seed {seed}, case {case}: {place} is kept\n")
                raise Violation(found) from violation
            report.violations.append(found)
            sys.stderr.write(f"VIOLATION {found}\n")
        case += 1
    shutil.rmtree(place)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description="Attack the service; see this module's text.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None, help="default: drawn, and printed")
    parser.add_argument("--case", type=int, default=0, help="begin with this case of the seed")
    parser.add_argument("--kinds", default=None, help="only these kinds of files, with commas")
    parser.add_argument("--go-on", action="store_true", help="do not end at a violation")
    given = parser.parse_args()
    seed = secrets.randbits(32) if given.seed is None else given.seed
    sys.stderr.write(f"seed {seed}\n")
    fork_from_now_on()
    try:
        report = attack(
            seed=seed,
            seconds=given.minutes * 60,
            first_case=given.case,
            kinds=None if given.kinds is None else set(given.kinds.split(",")),
            goes_on=given.go_on,
        )
    finally:
        end_forking()
    sys.stdout.write(f"seed {seed}: {report.text()}\n")
    sys.exit(bool(report.violations))


if __name__ == "__main__":
    main()
