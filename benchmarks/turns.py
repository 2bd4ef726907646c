"""Contenders that take turns: the same calls to several services, in one run on one machine.

A turn is short and there are several, so that what else the machine does hits all of them. Beside
the time of a call stands the processor time that it took, of the service and of the client: that
is what a busy machine does not move.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.harness import percentile, process_cpu_seconds

__all__ = ["Contender", "Tally", "calling", "take_turns"]

_Run = Callable[[float], list[float]]
_Named = TypeVar("_Named", bound=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """`run` makes calls for so many seconds and returns the seconds of each; `pid` answers them.

    `store_pid` is the server that `pid` asks meanwhile.
    """

    run: _Run
    pid: int | None = None
    store_pid: int | None = None


@dataclass(slots=True)
class Tally:
    """What one contender did in all its turns."""

    calls_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    service_s: float = 0.0
    client_s: float = 0.0
    store_s: float = 0.0

    @property
    def p50_ms(self) -> float:
        return percentile(self.calls_s, 0.5) * 1e3

    @property
    def p99_ms(self) -> float:
        return percentile(self.calls_s, 0.99) * 1e3

    @property
    def rate(self) -> float:
        """Calls a second."""
        return len(self.calls_s) / self.wall_s

    @property
    def service_ms(self) -> float:
        """Processor time of the service a call."""
        return self.service_s / len(self.calls_s) * 1e3

    @property
    def client_ms(self) -> float:
        """Processor time of this process a call."""
        return self.client_s / len(self.calls_s) * 1e3

    @property
    def store_ms(self) -> float:
        """Processor time of the store a call."""
        return self.store_s / len(self.calls_s) * 1e3

    @property
    def processor(self) -> str:
        """The processor times in words."""
        store = f", store {self.store_ms:.2f} ms" if self.store_s else ""
        return (
            f"processor a call: service {self.service_ms:.2f} ms,"
            f" client {self.client_ms:.2f} ms{store}"
        )


def calling(call: Callable[[], float | None]) -> _Run:
    """Return a `Contender.run` that calls again and again.

    A call that measures its own time returns its seconds, any other returns None and is timed.
    """

    def run(seconds: float) -> list[float]:
        times = []
        start = time.perf_counter()
        end = start + seconds
        while start < end:
            own = call()
            done = time.perf_counter()
            times.append(done - start if own is None else own)
            start = done
        return times

    return run


def take_turns(
    contenders: dict[_Named, Contender], *, turns: int, seconds: float
) -> dict[_Named, Tally]:
    """Let each run for `seconds`, all in turn, `turns` times; a first turn is not counted."""
    tallies: dict[_Named, Tally] = {name: Tally() for name in contenders}
    for contender in contenders.values():
        contender.run(seconds / 4)
    order: Sequence[_Named] = list(contenders)
    for turn in range(turns):
        # Who comes first changes: what a turn leaves behind is not always the same one's.
        for name in order if turn % 2 == 0 else reversed(order):
            _take_turn(contenders[name], tallies[name], seconds)
    return tallies


def _take_turn(contender: Contender, tally: Tally, seconds: float) -> None:
    gc.collect()
    service_s, store_s = _seconds_of(contender.pid), _seconds_of(contender.store_pid)
    client_s, start_s = time.process_time(), time.perf_counter()
    tally.calls_s += contender.run(seconds)
    tally.wall_s += time.perf_counter() - start_s
    tally.client_s += time.process_time() - client_s
    tally.service_s += _seconds_of(contender.pid) - service_s
    tally.store_s += _seconds_of(contender.store_pid) - store_s


def _seconds_of(pid: int | None) -> float:
    return 0.0 if pid is None else process_cpu_seconds(pid)
