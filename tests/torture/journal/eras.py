"""Eras of a service with a journal: machines lose their disks, owners are paused, stores go away.

`LostDiskEra` has one machine, which dies in every way a service without a journal does, and has
lost its disk after every other death. `TakeoverEra` has an owner and a standby. Both are judged by
what every era is judged by: with `--journal-ack journal` nothing acknowledged is ever lost.
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from streamhouse.api.client import StreamhouseClient
from tests.support.faulty_store import CALM, FaultPlan
from tests.support.journal_machines import JournalHome, Machine, Pair
from tests.support.service_process import DiedAtStart, ServiceProcess
from tests.torture.deaths import Death
from tests.torture.doomed_service import SERVICE_STEPS
from tests.torture.era import SERVICE_LIMITS, Era, Report
from tests.torture.journal.registers import Registers
from tests.torture.journal.standby_users import StandbyAnswers, StandbyUsers
from tests.torture.writers import PATIENCE_S

__all__ = ["LIMITS", "JournalEra", "LostDiskEra", "TakeoverEra"]

_LEASE_S: Final = 2.0
_OWNER_TIMEOUT_S: Final = 180.0
_ZOMBIE_TIMEOUT_S: Final = 60.0
_STARTS: Final = 5
_ROLES: Final[tuple[tuple[str, ...], ...]] = ((), ("--standby",))
LIMITS: Final = (*SERVICE_LIMITS, "--lease-ms", str(int(_LEASE_S * 1_000)), "--readers", "1")
_PLANS: Final = (CALM, FaultPlan(share=0.03), FaultPlan(share=0.25, delay_ms_max=100))


class JournalEra(Era):
    """What both have: a home that outlives machines, and a store that misbehaves at times."""

    def __init__(
        self,
        directory: Path,
        chance: random.Random,
        report: Report,
        home: JournalHome,
        *,
        machines: list[Machine],
    ) -> None:
        endpoint = ",".join(machine.endpoint for machine in machines)
        patient = f"{endpoint}#failover_s={PATIENCE_S:g}"
        super().__init__(directory, chance, report, endpoint=patient)
        self._endpoint_now = f"{endpoint}#failover_s=0.1"
        self._home = home
        self._leaving: threading.Timer | None = None
        self._registers = Registers(self._gate, endpoint, [m.endpoint for m in machines])

    def _prepare(self) -> None:
        super()._prepare()
        with StreamhouseClient(self._endpoint) as client:
            self._registers.create(client)
        self._registers.start()

    def _judge_all(self) -> None:
        super()._judge_all()
        self._report.rows_judged += self._registers.judge()

    def _check_directory(self, *arguments: str) -> None:
        super()._check_directory(*self._home.catalog_arguments, *arguments)

    def _trouble_store(self) -> None:
        """From now on the store may misbehave, or be away for some seconds."""
        faulty = self._home.faulty
        if faulty is None:
            return
        faulty.plan = self._random.choice(_PLANS)
        if self._random.random() < 0.25:
            seconds = self._random.choice((0.3, 1.0, 1.5 * _LEASE_S))
            leaving_s = self._random.uniform(0.0, 1.0)
            self._leaving = threading.Timer(leaving_s, faulty.go_away, args=(seconds,))
            self._leaving.start()

    def _calm_store(self) -> None:
        """From now on it does what it should."""
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving.join()
            self._leaving = None
        if self._home.faulty is not None:
            self._report.store_faults.update(self._home.faulty.calm())

    def _store_away(self, *_: Machine) -> None:
        faulty = self._home.faulty
        if faulty is not None:
            seconds = self._random.choice((0.5, _LEASE_S, 2 * _LEASE_S))
            faulty.go_away(seconds)
            threading.Event().wait(seconds)
            faulty.come_back()


class LostDiskEra(JournalEra):
    """One machine, whose disk is often gone after a death."""

    def __init__(
        self, directory: Path, chance: random.Random, report: Report, home: JournalHome
    ) -> None:
        self._machine = Machine(home, "one", *LIMITS)
        self._is_clean = False
        super().__init__(directory, chance, report, home, machines=[self._machine])

    @contextlib.contextmanager
    def _service(self, command: tuple[str, ...] | None) -> Iterator[ServiceProcess]:
        machine = self._machine
        try:
            yield self._started(command)
        finally:
            machine.end()

    def _started(self, command: tuple[str, ...] | None) -> ServiceProcess:
        """Start the service; it may end if the lease of the last one was renewed late."""
        self._calm_store()
        for _ in range(_STARTS):
            process = self._machine.start(*self._random.choice(_ROLES), command=command)
            try:
                self._machine.wait_until_owner(_OWNER_TIMEOUT_S)
            except DiedAtStart:
                self._machine.kill()
                if command is not None:
                    raise
            else:
                return process
        raise AssertionError(f"the service did not start in {_STARTS} attempts")

    def _live(self, death: Death) -> None:
        # A clean stop needs its store; some faults of a disk end a service with a journal.
        self._is_clean = death.is_clean
        super()._live(death._replace(goes_on=False))

    def _judge_cuts_until(self, is_over: Callable[[], bool], seconds: float) -> None:
        if not self._is_clean:
            self._trouble_store()
        super()._judge_cuts_until(is_over, seconds)

    def _data_dir(self) -> Path:
        return self._machine.data_dir

    def _befall_disk(self) -> None:
        if self._random.random() < 0.5:
            self._machine.lose()
            self._report.disks_lost += 1


class TakeoverEra(JournalEra):
    """Two machines; what befalls the owner is drawn, and the other one takes over."""

    def __init__(
        self, directory: Path, chance: random.Random, report: Report, home: JournalHome
    ) -> None:
        self._pair = Pair(home, *LIMITS)
        super().__init__(directory, chance, report, home, machines=self._pair.machines)
        self._standby_users = StandbyUsers(self._gate, self._pair.endpoint)
        self._standby_answers = StandbyAnswers()
        self._faults: dict[str, Callable[[Machine], None]] = {
            "disk of the owner lost": self._lose,
            "owner killed": self._kill,
            "owner paused beyond its lease": self._pause,
            "owner stopped": self._stop,
            "standby killed, too, while it takes over": self._kill_both,
            "all disks lost": self._lose_all,
            "standby killed": self._kill_standby,
            "store away": self._store_away,
            "owner dies in a tiering round": self._die_in_a_round,
            "owner dies before a transaction's decision": self._die_before_a_decision,
        }

    def run(self, lives: int) -> None:
        try:
            super().run(lives)
        finally:
            for machine in self._pair.machines:
                machine.kill()
            self._report.standby_answers += self._standby_answers.by_kind

    def _prepare(self) -> None:
        super()._prepare()
        with StreamhouseClient(self._endpoint) as client:
            self._standby_users.create(client)
        self._standby_users.start()

    def _judge_all(self) -> None:
        super()._judge_all()
        self._report.rows_judged += self._standby_users.judge()

    def _judging_client(self) -> StreamhouseClient:
        """Let a standby answer, too; each checker asks for the positions before it looks up."""
        return StreamhouseClient(self._endpoint, read_from=self._random.choice(("owner", "any")))

    @contextlib.contextmanager
    def _service(self, command: tuple[str, ...] | None) -> Iterator[ServiceProcess]:
        """See that somebody serves; a pair lives on when it was judged."""
        owner = self._somebody_serves(command)
        assert owner.process is not None
        yield owner.process

    def _data_dir(self) -> Path:
        """Return the disk of the last owner, both stopped."""
        owner = self._somebody_serves(None)
        for machine in (self._pair.other(owner), owner):
            machine.end()
        return owner.data_dir

    def _live_and_die(self) -> None:
        kind = self._random.choice(sorted(self._faults))
        owner = self._somebody_serves(self._draw_command())
        self._keep_workers()
        self._gate.open()
        self._trouble_store()
        self._judge_cuts_until(lambda: False, self._random.uniform(0.2, 2.5))
        self._standby_answers.note(self._pair.machines)
        self._faults[kind](owner)
        started_s = time.monotonic()
        now = self._somebody_serves(None)
        if now is not owner:
            self._report.takeovers_s.append(time.monotonic() - started_s)
        self._judge_cuts_until(lambda: False, self._random.uniform(0.2, 1.5))
        self._calm_store()
        self._report.deaths[kind] += 1
        self._gate.close()
        with self._service(None):
            self._judge_all()
        self._standby_answers.note(self._pair.machines)

    def _draw_command(self) -> tuple[str, ...] | None:
        """Sometimes the next process dies by itself, at a step."""
        if self._random.random() < 0.6:
            return None
        step = self._random.choice(sorted(SERVICE_STEPS))
        count = self._random.choice((1, 1, 2, 5, 20))
        return "-m", "tests.torture.doomed_service", step, str(count)

    def _somebody_serves(self, command: tuple[str, ...] | None) -> Machine:
        """Start what has ended, wait until one of them owns the shard, and return it.

        Who is doomed by `command` may die before; what is started in its place is not doomed.
        """
        deadline_s = time.monotonic() + _OWNER_TIMEOUT_S
        pause = threading.Event()
        while True:
            for machine in self._pair.machines:
                if machine.process is not None and machine.process.has_ended():
                    machine.kill()
                if machine.process is None:
                    with contextlib.suppress(DiedAtStart):
                        machine.start("--standby", command=command)
                    command = None
            for machine in self._pair.machines:
                if machine.process is not None and machine.is_owner():
                    return machine
            assert time.monotonic() < deadline_s, self._pair.describe("nobody owns the shard")
            pause.wait(0.02)

    # -- what befalls an owner --------------------------------------------------------------------

    def _lose(self, owner: Machine) -> None:
        owner.lose()
        self._report.disks_lost += 1

    def _kill(self, owner: Machine) -> None:
        """Kill it; started again before its lease has run out, it takes its own shard back."""
        owner.kill()
        if self._random.random() < 0.7:
            threading.Event().wait(self._random.uniform(_LEASE_S, _LEASE_S + 2.0))

    def _stop(self, owner: Machine) -> None:
        if owner.process is not None and not owner.process.has_ended():
            owner.process.send(signal.SIGTERM)
            owner.process.wait()

    def _kill_standby(self, owner: Machine) -> None:
        self._pair.other(owner).kill()

    def _kill_both(self, owner: Machine) -> None:
        self._kill_or_lose(owner)
        threading.Event().wait(self._random.uniform(0.0, _LEASE_S + 1.5))
        self._kill_or_lose(self._pair.other(owner))

    def _lose_all(self, owner: Machine) -> None:
        for machine in self._pair.machines:
            self._lose(machine)

    def _kill_or_lose(self, machine: Machine) -> None:
        (self._lose if self._random.random() < 0.5 else Machine.kill)(machine)

    def _die_in_a_round(self, owner: Machine) -> None:
        """A worker has its plan from this owner, and gives its answer to the next one."""
        with self._round_under_way() as step:
            self._report.worker_deaths[f"held at {step or 'none'} while its owner died"] += 1
            self._kill_or_lose(owner)
            self._somebody_serves(None)

    def _die_before_a_decision(self, owner: Machine) -> None:
        """What was begun and staged at this owner is decided at the next one."""
        with self._transactions_under_way():
            self._kill_or_lose(owner)
            self._somebody_serves(None)

    def _pause(self, owner: Machine) -> None:
        """Stop the process for longer than its lease; it must end when it goes on."""
        process = owner.process
        assert process is not None
        if process.has_ended():
            return
        process.send(signal.SIGSTOP)
        other = self._pair.other(owner)
        try:
            other.wait_until_owner(_OWNER_TIMEOUT_S)
            self._judge_cuts_until(lambda: False, self._random.uniform(0.0, 1.0))
        except DiedAtStart:
            # Doomed. Nobody has taken the shard, perhaps: the owner may go on.
            return
        finally:
            process.send(signal.SIGCONT)
        assert ended_within(process, _ZOMBIE_TIMEOUT_S), self._pair.describe(
            "a paused owner goes on although its shard was taken"
        )


def ended_within(process: ServiceProcess, timeout_s: float) -> bool:
    """Wait until a process ends by itself; whether that came."""
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while not process.has_ended():
        if time.monotonic() > deadline_s:
            return False
        pause.wait(0.05)
    return True
