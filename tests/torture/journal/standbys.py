"""An era of an owner and two standbys, read from by turns, any of them killed, paused or damaged.

With `--journal-ack disk`, which is drawn, rows may be lost when another process takes the shard.
"""

from __future__ import annotations

import contextlib
import faulthandler
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from streamhouse.api.client import StreamhouseClient
from tests.support.faulty_store import CALM, FaultPlan
from tests.support.journal_machines import JournalHome, Machine
from tests.support.service_process import DiedAtStart
from tests.torture.era import Report
from tests.torture.journal.eras import LIMITS, ended_within
from tests.torture.journal.standby_users import StandbyAnswers, StandbyUsers
from tests.torture.writers import Gate

__all__ = ["StandbysEra"]

_MACHINES: Final = ("one", "two", "three")
_TIMEOUT_S: Final = 180.0
_QUIET_WAIT_S: Final = 100.0
_PLANS: Final = (CALM, CALM, FaultPlan(share=0.05, delay_ms_max=100))


class StandbysEra:
    """See the module."""

    def __init__(
        self, directory: Path, chance: random.Random, report: Report, home: JournalHome
    ) -> None:
        del directory
        self._random = chance
        self._report = report
        self._home = home
        self._may_lose = chance.random() < 0.5
        acknowledged = ("--journal-ack", "disk" if self._may_lose else "journal")
        self._machines = [Machine(home, name, *LIMITS, *acknowledged) for name in _MACHINES]
        self._gate = Gate()
        self._answers = StandbyAnswers()
        endpoint = ",".join(machine.endpoint for machine in self._machines)
        self._users = StandbyUsers(self._gate, endpoint)
        self._of_owner: dict[str, Callable[[Machine], None]] = {
            "owner beside two standbys killed": Machine.kill,
            "owner beside two standbys lost with its disk": self._lose,
            "owner beside two standbys paused beyond its lease": self._pause_owner,
        }
        self._of_standby: dict[str, Callable[[Machine], None]] = {
            "owner beside two standbys stopped": lambda _: self._stop(self._owner()),
            "standby that is read killed": Machine.kill,
            "standby that is read lost with its disk": self._lose,
            "standby that is read stopped": self._stop,
            "standby that is read paused": self._pause,
            "files of a standby that is read damaged": self._damage,
        }

    def run(self, lives: int) -> None:
        """Use the tables, hurt a process, and judge; again and again."""
        try:
            self._machines[0].start()
            self._machines[0].wait_until_owner(_TIMEOUT_S)
            with StreamhouseClient(self._machines[0].endpoint) as client:
                self._users.create(client)
            self._users.start()
            for _ in range(lives):
                pid = self._owner_pid()
                self._gate.open()
                self._live()
                self._gate.close()
                self._judge(may_have_lost=self._may_lose and self._owner_pid() != pid)
        finally:
            self._gate.end()
            for machine in self._machines:
                machine.kill()
        self._report.standby_answers += self._answers.by_kind

    def _live(self) -> None:
        if self._home.faulty is not None:
            self._home.faulty.plan = self._random.choice(_PLANS)
        self._wait(1.0, 3.0)
        kind = self._random.choice(sorted({**self._of_owner, **self._of_standby}))
        self._answers.note(self._machines)
        owner = self._owner()
        if kind in self._of_owner:
            self._of_owner[kind](owner)
        else:
            standbys = [machine for machine in self._machines if machine is not owner]
            self._of_standby[kind](self._random.choice(standbys))
        self._report.deaths[kind] += 1
        self._wait(0.0, 2.0)
        self._owner()
        self._wait(0.5, 2.0)
        self._answers.note(self._machines)
        if self._home.faulty is not None:
            self._report.store_faults.update(self._home.faulty.calm())

    def _judge(self, *, may_have_lost: bool) -> None:
        if not self._gate.wait_until_empty(_QUIET_WAIT_S):
            faulthandler.dump_traceback()
            raise AssertionError(f"calls were never answered: {self._users.inside}")
        if may_have_lost:
            # Also without a fault: a busy machine may renew its lease too late.
            self._users.forget()
        self._report.rows_judged += self._users.judge()

    def _owner_pid(self) -> int:
        process = self._owner().process
        assert process is not None
        return process.pid

    def _wait(self, least_s: float, most_s: float) -> None:
        threading.Event().wait(self._random.uniform(least_s, most_s))

    def _owner(self) -> Machine:
        """Start what has ended, wait until one of them owns the shard, and return it."""
        deadline_s = time.monotonic() + _TIMEOUT_S
        while True:
            for machine in self._machines:
                if machine.process is not None and machine.process.has_ended():
                    machine.kill()
                if machine.process is None:
                    with contextlib.suppress(DiedAtStart):
                        machine.start("--standby")
            for machine in self._machines:
                if machine.process is not None and machine.is_owner():
                    return machine
            assert time.monotonic() < deadline_s, "nobody owns the shard"
            threading.Event().wait(0.02)

    # -- what befalls a process -------------------------------------------------------------------

    def _lose(self, machine: Machine) -> None:
        machine.lose()
        self._report.disks_lost += 1

    def _stop(self, machine: Machine) -> None:
        process = machine.process
        if process is not None and not process.has_ended():
            process.send(signal.SIGTERM)
            process.wait()

    def _pause(self, standby: Machine) -> None:
        """Stop a standby for a while: its answers come late, and it goes on where it was."""
        process = standby.process
        assert process is not None
        process.send(signal.SIGSTOP)
        try:
            self._wait(0.1, 4.0)
        finally:
            process.send(signal.SIGCONT)

    def _pause_owner(self, owner: Machine) -> None:
        """Stop the owner until another process owns the shard; it must end when it goes on."""
        process = owner.process
        assert process is not None
        process.send(signal.SIGSTOP)
        deadline_s = time.monotonic() + _TIMEOUT_S
        others = [machine for machine in self._machines if machine is not owner]
        try:
            while not any(machine.is_owner() for machine in others):
                assert time.monotonic() < deadline_s, "nobody takes the shard"
                threading.Event().wait(0.05)
            self._wait(0.0, 1.0)
        finally:
            process.send(signal.SIGCONT)
        assert ended_within(process, _TIMEOUT_S), "a paused owner goes on without its shard"

    def _damage(self, standby: Machine) -> None:
        """Change bytes of a standby's files while it is read; its disk is thrown away then."""
        tables = standby.data_dir / "tables"
        files = sorted((*tables.glob("*/bucket-*/*.log"), *tables.glob("*/bucket-*/kv/*.sst")))
        for path in self._random.sample(files, min(len(files), 4)):
            with contextlib.suppress(FileNotFoundError):
                self._flip(path)
        self._wait(1.0, 3.0)
        self._lose(standby)

    def _flip(self, path: Path) -> None:
        size = path.stat().st_size
        if not size:
            return
        with path.open("r+b") as file:
            for _ in range(3):
                at = self._random.randrange(size)
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 0x55]))
