"""Owners of one journal, taken step by step in any order over a store that may do anything.

The protocol is the real one: `epochs.py`, `pipeline.py` and `reader.py` as they are. A world offers
what can happen next (`choices`); whoever drives it picks. What must hold is checked as it goes:
what a new owner reads never changes after, and has all that was ever acknowledged, once, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final

from streamhouse.storage_service.ownership.journal._pipeline import Fenced, Pipeline, Sent
from streamhouse.storage_service.ownership.journal.epochs import (
    SealReason,
    TakenByOtherError,
    Tenure,
    newest_epoch,
    take,
)
from streamhouse.storage_service.ownership.journal.names import Place
from streamhouse.storage_service.ownership.journal.operations import Append
from streamhouse.storage_service.ownership.journal.reader import JournalReader
from streamhouse.storage_service.ownership.journal.steps import Create, Get, List, Steps
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectEntry,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectStoreError,
)
from tests.support.journal_world import NAMES, numbered, taken
from tests.support.memory_store import MemoryStore

__all__ = ["Choice", "Plan", "World"]

Choice = tuple[str, int, int, str]
"""What happens, to which owner, which of its tasks, and what the store does."""

_FIRST: Final = MemoryStore()
_OPENED: Final = taken(_FIRST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What each owner does, and how much may go wrong. Owner 0 has epoch 1 at the start.

    `rolls`: owners that seal their epoch themselves before they checkpoint and trim. The last two
    are wrong on purpose.
    """

    operations: tuple[int, ...]
    window: int = 2
    rolls: frozenset[int] = frozenset()
    trims: frozenset[int] = frozenset()
    faults: int = 0
    trims_seals: bool = False
    trims_newest: bool = False


@dataclass
class _Task:
    steps: Steps[Any]
    done: Callable[[Any], None]
    step: Create | Get | List
    answers: list[Hashable] = field(default_factory=list)


class _Owner:
    """One process: it takes over unless it is the first, sends, may roll, checkpoint and trim."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.left = [100 * number + n for n in range(world.plan.operations[number])]
        self.tasks: list[_Task] = []
        self.pipeline: Pipeline | None = None
        self.is_over = False
        self.has_rolled = number not in world.plan.rolls
        self.has_begun = False
        self.doomed: list[str] = []
        self.sent: list[int] = []

    def start(self, steps: Steps[Any], done: Callable[[Any], None]) -> None:
        self.tasks.append(_Task(steps, done, next(steps)))

    def begin(self) -> None:
        self.has_begun = True
        if self.number == 0:
            self.opened(_OPENED)
            return

        def taking() -> Steps[Tenure]:
            after = yield from newest_epoch(NAMES)
            nonce = bytes([self.number]) * 16
            return (yield from take(NAMES, after=after, endpoint="", lease_ms=1, nonce=nonce))

        self.start(taking(), self.opened)

    def opened(self, tenure: Tenure) -> None:
        self.world.took(tenure.epoch)
        if self.pipeline is None:
            self.pipeline = Pipeline(tenure)
        else:
            self.pipeline.rolled(tenure)
            self.has_rolled = True
        if self.number in self.world.plan.trims and self.has_rolled:
            self.world.checkpoint(tenure.epoch)
            self.doomed = self.world.trimmed_below(Place(tenure.epoch, 0))
        self.send()

    def send(self) -> None:
        """Put on its way what may be."""
        pipeline = self.pipeline
        assert pipeline is not None
        window = self.world.plan.window
        while self.left and pipeline.has_room and pipeline.in_flight < window:
            number = self.left.pop(0)
            self.sent.append(number)
            self.put(pipeline.send([numbered(number)]))
            if not self.has_rolled and len(self.left) == 1:
                self.put(pipeline.seal(SealReason.ROLLED))

    def put(self, sent: Sent) -> None:
        self.start(sent.steps(), lambda _: self.stored(sent))

    def stored(self, sent: Sent) -> None:
        pipeline = self.pipeline
        assert pipeline is not None
        pipeline.stored(sent)
        done = pipeline.stored_position
        self.world.acknowledged[self.number] = self.sent[:done]
        if self.world.plan.trims_newest and done == 2 and self.number == 0:
            self.world.checkpoint_at(Place(pipeline.tenure.epoch, 3))
            self.doomed = self.world.trimmed_below(Place(pipeline.tenure.epoch, 3))
        if pipeline.ended_for is not None:
            self.start(pipeline.next_epoch(), self.opened)
        self.send()


class World:
    """See the module."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.objects = dict(_FIRST.objects)
        self.former = [dict(self.objects)]
        self.late: list[tuple[str, bytes]] = []
        self.faults_left = plan.faults
        self.acknowledged: dict[int, list[int]] = {}
        self.read: list[int] = []
        self.manifest: tuple[Place, list[int]] = (Place(1, 0), [])
        self.owners = [_Owner(self, number) for number in range(len(plan.operations))]
        self.owners[0].begin()

    # -- what may happen -------------------------------------------------------------------------

    def choices(self) -> list[Choice]:
        """Return all that can happen next."""
        found: list[Choice] = []
        for number, owner in enumerate(self.owners):
            if owner.is_over:
                continue
            if not owner.has_begun:
                found.append(("begin", number, 0, ""))
            for index, task in enumerate(owner.tasks):
                found.extend(("step", number, index, fault) for fault in self._faults(task.step))
            found.extend(("trim", number, index, "") for index in range(len(owner.doomed)))
        found.extend(("late", 0, index, "") for index in range(len(self.late)))
        return found

    def happen(self, choice: Choice) -> None:
        """Let one of the choices happen, and check what must hold."""
        kind, number, index, fault = choice
        if kind == "late":
            key, data = self.late.pop(index)
            self.objects.setdefault(key, data)
        elif kind == "begin":
            self.owners[number].begin()
        elif kind == "trim":
            self.objects.pop(self.owners[number].doomed.pop(index), None)
        elif kind == "stop":
            self.owners[number].is_over = True
        else:
            self._step(self.owners[number], self.owners[number].tasks[index], fault)
        if self.objects != self.former[-1]:
            self.former.append(dict(self.objects))

    def key(self) -> Hashable:
        """Return the same for worlds that go on the same."""
        owners = tuple(
            (
                owner.has_begun,
                owner.is_over,
                tuple(owner.doomed),
                tuple(owner.left),
                tuple(self.acknowledged.get(number, ())),
                tuple((repr(task.step), tuple(task.answers)) for task in owner.tasks),
            )
            for number, owner in enumerate(self.owners)
        )
        # Former lists matter only while one may be answered.
        former = tuple(map(_digest, self.former)) if self.faults_left else ()
        return owners, _digest(self.objects), former, tuple(self.late), self.faults_left

    def check(self) -> None:
        """Check what must hold at any time: all that was acknowledged is there once, in order."""
        history = self.history()
        assert len(set(history)) == len(history), f"twice: {history}"
        for number, numbers in self.acknowledged.items():
            found = [n for n in history if n // 100 == number]
            assert found[: len(numbers)] == numbers, f"lost of {numbers}: {history}"

    # -- what was written ------------------------------------------------------------------------

    def history(self, before: Place | None = None) -> list[int]:
        """Return what a reader finds that begins at the newest checkpoint."""
        store = MemoryStore()
        store.objects = self.objects
        place, found = self.manifest[0], list(self.manifest[1])
        reader = JournalReader(store, NAMES, start=place)
        while before is None or reader.place < before:
            if (one := reader.next()) is None:
                break
            found.extend(op.position for op in one.operations if isinstance(op, Append))
        return found

    def took(self, epoch: int) -> None:
        """Somebody opened an epoch, and reads: this is what the journal says from now on."""
        read = self.history(Place(epoch, 0))
        assert read[: len(self.read)] == self.read, f"history changed: {self.read} -> {read}"
        self.read = read
        self.check()

    def checkpoint(self, epoch: int) -> None:
        """Write the manifest of the place where an epoch opens, unless there is a newer one."""
        self.checkpoint_at(Place(epoch, 0))

    def checkpoint_at(self, place: Place) -> None:
        """Write a manifest."""
        if place > self.manifest[0]:
            self.manifest = (place, self.history(place))

    def trimmed_below(self, place: Place) -> list[str]:
        """Return what trimming deletes once there is a manifest of a place."""
        seals = set()
        for key, data in self.objects.items():
            if b'"reason"' in data:
                seals.add(key)
        found = []
        for key in sorted(self.objects):
            one = NAMES.place_of_object(key)
            if (
                one is not None
                and one < place
                and one.seq
                and (self.plan.trims_seals or key not in seals)
            ):
                found.append(key)
        return found

    # -- the store -------------------------------------------------------------------------------

    def _faults(self, step: Create | Get | List) -> list[str]:
        if not self.faults_left:
            return [""]
        if isinstance(step, Create):
            return ["", "lost", "late", "conflict"]
        if isinstance(step, List):
            return ["", *(f"stale {n}" for n in range(len(self.former) - 1))]
        return [""]

    def _step(self, owner: _Owner, task: _Task, fault: str) -> None:
        self.faults_left -= bool(fault)
        try:
            answer = self._do(task.step, fault)
        except ObjectStoreError as error:
            task.answers.append(type(error).__name__)
            raised = error
            self._go_on(owner, task, lambda: task.steps.throw(raised))
            return
        if answer is _NO_ANSWER:
            # It asks the same again.
            task.answers.append("no answer")
            return
        task.answers.append(bytes(answer) if isinstance(answer, memoryview) else repr(answer))
        self._go_on(owner, task, lambda: task.steps.send(answer))

    def _go_on(self, owner: _Owner, task: _Task, go: Callable[[], Any]) -> None:
        try:
            task.step = go()
        except StopIteration as stop:
            owner.tasks.remove(task)
            task.done(stop.value)
        except (Fenced, TakenByOtherError):
            # What it has asked to delete may still be deleted.
            owner.tasks.clear()
            owner.left.clear()

    def _do(self, step: Create | Get | List, fault: str) -> Any:
        if isinstance(step, Create):
            data = b"".join(step.buffers)
            if fault == "late":
                self.late.append((step.key, data))
                return _NO_ANSWER
            if fault == "conflict" or step.key in self.objects:
                raise ObjectExistsError(step.key)
            self.objects[step.key] = data
            return _NO_ANSWER if fault == "lost" else None
        if isinstance(step, Get):
            if step.key not in self.objects:
                raise ObjectNotFoundError(step.key)
            return memoryview(self.objects[step.key])
        objects = self.former[int(fault.split()[1])] if fault else self.objects
        keys = sorted(k for k in objects if k.startswith(step.folder) and k > step.start_after)
        return [ObjectEntry(key, len(objects[key])) for key in keys[: step.count_max]]


_NO_ANSWER: Final = object()


def _digest(objects: dict[str, bytes]) -> int:
    return hash(frozenset(objects.items()))
