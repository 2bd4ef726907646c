"""Processes that want one journal, killed with -9 and stopped beyond their lease; then judged.

`make contenders` runs it for as long as you like.
What must hold: every acknowledged record is in
the journal once, in the order of real time; no read shows less than what was acknowledged before it
was asked for, by whichever process.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamhouse.storage_service.ownership.journal.epochs import newest_epoch
from streamhouse.storage_service.ownership.journal.steps import do, run
from streamhouse.storage_service.ownership.journal.store.store_opening import open_store
from tests.support.python_process import ForkedProcess, start_python
from tests.torture.journal_contender import FENCED, NAMES, texts_of

__all__ = ["Told", "contend", "judge"]

_CONTENDERS: Final = 3
_LEASE_MS: Final = 500


@dataclass(frozen=True, slots=True)
class Told:
    """Something that was told to a caller between two moments of one clock."""

    what: str
    asked_ns: int
    told_ns: int
    text: str


@dataclass(slots=True)
class Report:
    """What happened, and what was judged."""

    kills: int = 0
    pauses: int = 0
    fenced: int = 0
    epochs: int = 0
    records: int = 0
    reads: int = 0


def contend(folder: Path, *, seed: int, seconds: float, url: str = "") -> Report:
    """Let them contend for so long; raise `AssertionError` if anything was broken."""
    chance, report = random.Random(seed), Report()
    url = url or f"file://{folder}/store"
    lives = 0

    def start() -> subprocess.Popen[bytes] | ForkedProcess:
        nonlocal lives
        lives += 1
        arguments = [url, str(folder / f"ledger-{lives}"), f"{seed}-{lives}", str(_LEASE_MS)]
        with (folder / "errors").open("ab") as errors:
            return start_python(
                ["-m", "tests.torture.journal_contender", *arguments], stderr=errors.fileno()
            )

    def end(process: subprocess.Popen[bytes] | ForkedProcess) -> None:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

    running = [start() for _ in range(_CONTENDERS)]
    end_s = time.monotonic() + seconds
    try:
        while time.monotonic() < end_s:
            time.sleep(chance.uniform(0.05, 0.6))  # sleep: the next one comes at a drawn time
            index = chance.randrange(_CONTENDERS)
            for at, process in enumerate(running):
                if (code := process.poll()) is not None:
                    assert code == FENCED, f"contender ended with {code}"
                    report.fenced += 1
                    end(process)
                    running[at] = start()
            if chance.random() < 0.4:
                end(running[index])
                running[index] = start()
                report.kills += 1
            else:
                report.pauses += 1
                running[index].send_signal(signal.SIGSTOP)
                pause_s = _LEASE_MS / 1e3 * chance.choice((0.5, 1.1, 2.5))
                time.sleep(pause_s)  # sleep: the others see its lease run out, or nearly
                running[index].send_signal(signal.SIGCONT)
    finally:
        for process in running:
            end(process)
    judge(folder, url, report)
    return report


def judge(folder: Path, url: str, report: Report) -> None:
    """Compare the ledgers with the journal."""
    store = open_store(url)
    texts = texts_of(store)
    places = {text: place for place, text in enumerate(texts)}
    assert len(places) == len(texts), "a record is in the journal twice"
    told = [one for ledger in folder.glob("ledger-*") for one in _told(ledger)]
    records = [one for one in told if one.what == "record"]
    missing = [one.text for one in records if one.text not in places]
    assert not missing, f"acknowledged and lost: {missing[:10]}"
    acknowledged = iter(sorted(records, key=lambda one: one.told_ns))
    following, last = next(acknowledged, None), -1
    for one in sorted(told, key=lambda one: one.asked_ns):
        while following is not None and following.told_ns < one.asked_ns:
            last = max(last, places[following.text])
            following = next(acknowledged, None)
        place = places[one.text] if one.text else -1
        is_late_enough = place >= last if one.what == "read" else place > last
        assert is_late_enough, f"{one} is at {place}, after {texts[last]} at {last} was told"
    report.records, report.reads = len(records), len(told) - len(records)
    report.epochs = run(newest_epoch(NAMES), lambda step: do(store, step))


def _told(ledger: Path) -> list[Told]:
    found = []
    for line in ledger.read_text().splitlines(keepends=True):
        what, asked, told, text = line.split(" ")
        assert text.endswith("\n"), f"{ledger} has half a line"
        found.append(Told(what, int(asked), int(told), text.rstrip("\n")))
    return found


def main() -> None:
    """Run rounds of a minute until the time is over; print what each judged."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options = parser.parse_args()
    end_s = time.monotonic() + 60 * options.minutes
    seed = options.seed
    while (left_s := end_s - time.monotonic()) > 0:
        with tempfile.TemporaryDirectory(prefix="streamhouse-contenders-") as folder:
            report = contend(Path(folder), seed=seed, seconds=min(60.0, left_s))
        sys.stdout.write(f"seed={seed} {report}\n")
        sys.stdout.flush()
        seed += 1


if __name__ == "__main__":
    main()
