"""Tiering under random crashes, races and other engines: every row is in the lake exactly once.

Goal: whatever order workers claim, die, stall, wake up late and commit in, and whatever another
engine does to the lake tables in between, each of them, the rows' own and the batch layout, holds
exactly the rows it covers, and in the end all rows.
Method: hypothesis draws a schedule of events over real lake tables and a service in memory; after
each event the lake is read back by stock pyiceberg and compared with the list of appended rows.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.table import Table

from streamhouse.core.errors import FencedError, StreamhouseError, UnknownOutcomeError
from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.core.model.table_state import TieringAssignment
from streamhouse.lake.snapshots._coverage import covered_offsets
from streamhouse.tiering.round._round import BATCH_STEPS, ROUND_STEPS, TieringRound
from tests.support.examples import examples
from tests.support.foreign_deletes import commit_compaction
from tests.support.tiering_world import Killed, TieringWorld, rows

BUCKETS = 2
LAYOUT = {"table.datalake.batch-layout.sort": "name, id"}
STEPS = (*ROUND_STEPS[:-1], *BATCH_STEPS, ROUND_STEPS[-1])

_EVENT = st.one_of(
    st.tuples(st.just("append"), st.integers(0, BUCKETS - 1), st.integers(1, 9)),
    st.tuples(st.just("tier")),
    st.tuples(st.just("die"), st.sampled_from(STEPS)),
    st.tuples(st.just("stall"), st.sampled_from(STEPS[:-1])),
    st.tuples(st.just("wake")),
    st.tuples(st.just("rewrite")),
    st.tuples(st.just("rewrite and expire")),
)


class _Schedule:
    """One world, and the workers that stalled in it."""

    def __init__(
        self,
        world: TieringWorld,
        roles: Sequence[LakeRole] = (LakeRole.ROWS,),
        version: str = "2",
    ) -> None:
        self.world = world
        self.roles = roles
        self.lengths = dict.fromkeys(range(BUCKETS), 0)
        self._stalled: list[_StalledRound] = []
        self._version = version
        properties = LAYOUT if LakeRole.BATCH in roles else {}
        properties = {**properties, "table.datalake.format-version": version}
        world.create_table(bucket_count=BUCKETS, properties=properties)

    def play(self, event: tuple[object, ...]) -> None:
        kind, *arguments = event
        getattr(self, "_" + str(kind).replace(" ", "_"))(*arguments)
        self.check()

    def finish(self) -> None:
        while self._stalled:
            self._wake()
        self.world.service.release("db.t")
        for summary in self.world.worker().run_once():
            assert summary.error is None
        self.check()
        for role in self.roles:
            assert self._covered(role) == self.lengths

    def check(self) -> None:
        for role in self.roles:
            self._check(role)

    def _check(self, role: LakeRole) -> None:
        covered = self._covered(role)
        assert all(covered[b] <= end for b, end in self.lengths.items())
        recorded = self._recorded(role)
        assert all(recorded[b] <= covered[b] for b in recorded), (
            "the service runs ahead of the lake"
        )
        if any(covered.values()):
            expected = [(b, offset) for b in sorted(covered) for offset in range(covered[b])]
            assert self.world.addresses(role.lake_name("db.t")) == expected

    def _recorded(self, role: LakeRole) -> Mapping[int, int]:
        lake = self.world.service.table_state("db.t").lake
        if role is LakeRole.ROWS:
            return lake.tiered_offsets
        return {} if lake.batch is None else lake.batch.tiered_offsets

    def _covered(self, role: LakeRole = LakeRole.ROWS) -> dict[int, int]:
        nothing = dict.fromkeys(range(BUCKETS), 0)
        if not list(self.world.folder.glob(f"warehouse/db/{role.lake_name('t')}/metadata/*.json")):
            return nothing
        metadata = self.world.lake_table(role.lake_name("db.t")).metadata
        found = covered_offsets(metadata, table_id=1, role=role)
        return nothing if found is None else dict(found.tiered_offsets)

    def _append(self, bucket: int, count: int) -> None:
        self.world.service.append("db.t", bucket, rows(self.lengths[bucket], count))
        self.lengths[bucket] += count

    def claim(self) -> TieringAssignment | None:
        # Every claim is granted: leases are what dead and slow workers have lost.
        self.world.service.release("db.t")
        answer = self.world.service.claim_tiering("w", tables=["db.t"], force=True)
        return answer if isinstance(answer, TieringAssignment) else None

    def _tier(self) -> None:
        if (assignment := self.claim()) is not None:
            self.world.round(assignment).run()

    def _die(self, at: str) -> None:
        def die(step: str) -> None:
            if step == at:
                raise Killed

        if (assignment := self.claim()) is not None:
            with contextlib.suppress(Killed):
                self.world.round(assignment, checkpoint=die).run()

    def _stall(self, at: str) -> None:
        if (assignment := self.claim()) is not None:
            make = functools.partial(self.world.round, assignment)
            self._stalled.append(_StalledRound(make, at))

    def _wake(self) -> None:
        if self._stalled:
            self._stalled.pop(0).wake()

    def _rewrite(self) -> None:
        if self._version == "3":
            return  # The other engine is stock pyiceberg, which writes version 2.
        for lake_table in self._tables_with_rows():
            commit_compaction(lake_table)

    def _rewrite_and_expire(self) -> None:
        if self._version == "3":
            return
        self._rewrite()
        for lake_table in self._tables_with_rows():
            head = lake_table.current_snapshot()
            assert head is not None
            old = [s.snapshot_id for s in lake_table.snapshots() if s != head]
            lake_table.maintenance.expire_snapshots().by_ids(old).commit()

    def _tables_with_rows(self) -> list[Table]:
        return [
            self.world.lake_table(role.lake_name("db.t"))
            for role in self.roles
            if any(self._covered(role).values())
        ]


class _StalledRound:
    """A round in its own thread, stopped at a step until it is woken."""

    def __init__(self, make: Callable[..., TieringRound], at: str) -> None:
        self._at = at
        self._has_stopped = threading.Event()
        self._may_go_on = threading.Event()
        self._error: BaseException | None = None
        self._round = make(checkpoint=self._stop)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._has_stopped.wait(60)

    def wake(self) -> None:
        self._may_go_on.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        # It may have been fenced, by the lake or by the service; nothing else may go wrong. Where
        # snapshots have expired that came after its commit, it cannot tell whether that landed.
        fenced = (FencedError, UnknownOutcomeError)
        if self._error is not None and not isinstance(self._error, fenced):
            raise self._error

    def _stop(self, step: str) -> None:
        if step == self._at and not self._has_stopped.is_set():
            self._has_stopped.set()
            assert self._may_go_on.wait(60)

    def _run(self) -> None:
        try:
            self._round.run()
        except StreamhouseError as error:
            self._error = error
        finally:
            # A round that ends before its step (recovery) does not keep the schedule waiting.
            self._has_stopped.set()


@settings(max_examples=examples(15), suppress_health_check=list(HealthCheck))
@given(
    roles=st.sampled_from([(LakeRole.ROWS,), (LakeRole.ROWS, LakeRole.BATCH)]),
    version=st.sampled_from(["2", "3"]),
    events=st.lists(_EVENT, min_size=3, max_size=12),
)
def test_rows_are_in_the_lake_exactly_once(
    roles: Sequence[LakeRole], version: str, events: list[tuple[object, ...]]
) -> None:
    with tempfile.TemporaryDirectory() as folder, TieringWorld(Path(folder)) as world:
        schedule = _Schedule(world, roles, version)
        schedule.play(("append", 0, 5))
        for event in events:
            schedule.play(event)
        schedule.finish()


def _race(world: TieringWorld, assignment: TieringAssignment, ready: threading.Barrier) -> str:
    """Run a round that waits for its rival right before its first commit."""
    waits = iter([ready.wait])

    def checkpoint(step: str) -> None:
        if step == "manifests-written":
            for wait in waits:
                with contextlib.suppress(threading.BrokenBarrierError):
                    wait(60)

    try:
        return world.round(assignment, checkpoint=checkpoint).run().kind
    except FencedError:
        # On a slow machine a heartbeat may say so before the commit: the rival goes on alone.
        ready.abort()
        return "fenced"


def test_two_workers_that_commit_at_the_same_moment(tmp_path: Path) -> None:
    """Both have everything written and go for the catalog at once; one is fenced."""
    with TieringWorld(tmp_path) as world, ThreadPoolExecutor(2) as pool:
        schedule = _Schedule(world)
        for _ in range(5):
            schedule.play(("append", 0, 3))
            ready = threading.Barrier(2)
            assignments = [schedule.claim(), schedule.claim()]
            rivals = [pool.submit(_race, world, a, ready) for a in assignments]

            outcomes = [rival.result(60) for rival in rivals]

            # The older claim may win the lake; then the service refuses its report.
            assert "fenced" in outcomes
            schedule.finish()
