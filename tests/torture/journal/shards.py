"""An era of `serve --shards 2`: shards and their supervisor die, and tables move meanwhile.

Whatever dies comes back by itself, or when the supervisor is started again. Every table is judged
as in any era, wherever it is then; at the end each is in one shard.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import StreamhouseError, UnknownOutcomeError
from tests.support.command_line import streamhouse
from tests.support.journal_machines import JournalHome, Machine
from tests.support.service_process import DiedAtStart, ServiceProcess
from tests.torture.era import Report
from tests.torture.journal.eras import LIMITS, JournalEra
from tests.torture.writers import Writer, patient_client

__all__ = ["ShardsEra"]

_SHARDS: Final = ("0", "1")
# Neither rounds nor transactions keep these where they are.
_OFTEN_FREE: Final = tuple(f"default.{name}" for name in ("log", "keys", "sums", "registers"))
_MOVE_WAIT_S: Final = 10.0
_STARTS: Final = 5
_GONE_TIMEOUT_S: Final = 60.0


class ShardsEra(JournalEra):
    """See the module."""

    def __init__(
        self, directory: Path, chance: random.Random, report: Report, home: JournalHome
    ) -> None:
        self._machine = Machine(home, "shards", "--shards", str(len(_SHARDS)), *LIMITS)
        super().__init__(directory, chance, report, home, machines=[self._machine])
        self._faults: dict[str, Callable[[], None]] = {
            "a shard killed": self._kill_shard,
            "a shard killed, its disk lost": self._lose_shard,
            "supervisor killed": self._kill_supervisor,
            "supervisor and shards killed": self._kill_all,
            "supervisor and shards killed, all disks lost": self._lose_all,
            "supervisor stopped": self._stop,
            "a shard dies in a tiering round": self._die_in_a_round,
            "a shard dies before a transaction's decision": self._die_before_a_decision,
            "a shard dies in a move": self._die_in_a_move,
            "store away": self._store_away,
        }

    def run(self, lives: int) -> None:
        try:
            super().run(lives)
            self._check_shards()
        finally:
            self._kill_all()

    @contextlib.contextmanager
    def _service(self, command: tuple[str, ...] | None) -> Iterator[ServiceProcess]:
        """See that a supervisor runs; it lives on when its tables were judged."""
        process = self._machine.process
        yield self._started() if process is None or process.has_ended() else process

    def _started(self) -> ServiceProcess:
        """Start it; that fails if a shard meets the lease of its last life, or a bad store."""
        self._machine.kill()
        self._calm_store()
        for _ in range(_STARTS):
            with contextlib.suppress(DiedAtStart):
                # A program of its own, whose children are the shards.
                return self._machine.start(is_executed=True)
        raise AssertionError(f"the service did not start in {_STARTS} attempts")

    def _prepare(self) -> None:
        super()._prepare()
        mover = Mover(
            self._gate,
            endpoint=self._endpoint,
            table="any",
            number=len(self._writers),
            seed=self._random.getrandbits(32),
        )
        self._writers.append(mover)

    def _check_directory(self, *arguments: str) -> None:
        """Each shard's is checked by its journal, when all is over."""

    def _check_shards(self) -> None:
        """Every table is in one shard, and the journal says so; nothing runs then."""
        movers = [w for w in self._writers if isinstance(w, Mover)]
        self._report.tables_moved += sum(mover.moved for mover in movers)
        with StreamhouseClient(self._endpoint) as client:
            tables = [f"default.{checker.table}" for checker in self._checkers]
            shown = [str(table["table"]) for table in client.status()["tables"]]
            assert sorted(shown) == sorted({*tables, *shown}), f"tables are {shown}"
            assert client.list_tables() == sorted(shown), "not all tables are served"
        process = self._machine.process
        assert process is not None
        assert process.terminate() == 0, "a clean stop failed"
        streamhouse("check", "--journal", self._home.url, env=self._home.env)
        self._report.checks += 1

    def _live_and_die(self) -> None:
        kind = self._random.choice(sorted(self._faults))
        with self._service(None):
            self._keep_workers()
        self._gate.open()
        self._trouble_store()
        self._judge_cuts_until(lambda: False, self._random.uniform(0.2, 2.5))
        self._faults[kind]()
        with self._service(None):
            self._judge_cuts_until(lambda: False, self._random.uniform(0.2, 1.5))
        self._calm_store()
        self._report.deaths[kind] += 1
        self._gate.close()
        with self._service(None):
            self._judge_all()

    # -- what befalls it --------------------------------------------------------------------------

    def _shards(self) -> dict[str, int]:
        """Return shard -> its process, of those that run now."""
        process = self._machine.process
        if process is None or process.has_ended():
            return {}
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        found = {}
        for child in listed.split():
            with contextlib.suppress(OSError, ValueError):
                arguments = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
                found[arguments[arguments.index(b"--shard") + 1].decode()] = int(child)
        return found

    def _kill_shard(self) -> None:
        shards = self._shards()
        if shards:
            _kill(shards[self._random.choice(sorted(shards))])

    def _lose_shard(self) -> None:
        """The supervisor waits meanwhile: it would start the shard on half a directory."""
        shards, process = self._shards(), self._machine.process
        if not shards or process is None:
            return
        shard = self._random.choice(sorted(shards))
        process.send(signal.SIGSTOP)
        _kill(shards[shard])
        self._lose(shard)
        process.send(signal.SIGCONT)

    def _lose(self, shard: str) -> None:
        shutil.rmtree(self._machine.data_dir / "shards" / shard, ignore_errors=True)
        self._report.disks_lost += 1

    def _kill_supervisor(self) -> None:
        """Its shards stop by themselves."""
        shards = self._shards()
        self._machine.kill()
        _wait_until_gone(shards)

    def _kill_all(self) -> None:
        shards = self._shards()
        self._machine.kill()
        for pid in shards.values():
            _kill(pid)
        _wait_until_gone(shards)

    def _lose_all(self) -> None:
        self._kill_all()
        for shard in _SHARDS:
            self._lose(shard)

    def _stop(self) -> None:
        self._machine.end()

    def _die_in_a_round(self) -> None:
        with self._round_under_way() as step:
            self._report.worker_deaths[f"held at {step or 'none'} while its shard died"] += 1
            (self._kill_all if self._random.random() < 0.5 else self._kill_shard)()

    def _die_in_a_move(self) -> None:
        (mover,) = (writer for writer in self._writers if isinstance(writer, Mover))
        mover.begins_to_move.clear()
        if mover.begins_to_move.wait(_MOVE_WAIT_S):
            # A move takes about so long, if it is not refused.
            threading.Event().wait(self._random.choice((0.02, 0.1, 0.3, 1.0)))
        (self._kill_all if self._random.random() < 0.3 else self._kill_shard)()

    def _die_before_a_decision(self) -> None:
        with self._transactions_under_way():
            (self._kill_all if self._random.random() < 0.5 else self._kill_shard)()


class Mover(Writer):
    """Moves a table to the other shard, or tries to, again and again."""

    def __init__(self, *given: object, **common: object) -> None:
        super().__init__(*given, **common)  # type: ignore[arg-type]
        self._client = patient_client(self.endpoint)
        self.moved = 0
        self.begins_to_move = threading.Event()

    def write(self) -> int:
        threading.Event().wait(self.random.uniform(0.0, 0.5))
        try:
            tables = self._client.status()["tables"]
            if self.random.random() < 0.7:
                tables = [table for table in tables if table["table"] in _OFTEN_FREE]
            if tables:
                table = self.random.choice(tables)
                other = next(shard for shard in _SHARDS if shard != table["shard"])
                self.begins_to_move.set()
                self._client.move_table(str(table["table"]), other)
                self.moved += 1
        except StreamhouseError as error:
            # It is in use, or was dropped, or it is not known what became of it.
            is_expected = error.retriable or isinstance(error, UnknownOutcomeError)
            if not is_expected and error.http_status != 404:
                raise
        return 0


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _wait_until_gone(shards: dict[str, int]) -> None:
    deadline_s = time.monotonic() + _GONE_TIMEOUT_S
    pause = threading.Event()
    while left := [shard for shard, pid in shards.items() if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline_s, f"shards {left} go on without their supervisor"
        pause.wait(0.05)
