"""Whatever a catalog answers, and however late what was sent to it lands, no live file is deleted.

One example is a table's life: rounds, rewrites, removals, expiry and orphan removal of its lake
tables by workers that come and go, through a catalog that loses requests and answers, lands commits
late (at a moment that is drawn), refuses what has landed and shows old states. At every moment each
file that a snapshot refers to is there; in the end, when all has arrived, no row is missing or
there twice, for stock pyiceberg and for DuckDB.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyiceberg.exceptions import NoSuchTableError

from integration.judges.duckdb_read import connect
from streamhouse.core.backoff import Backoff
from streamhouse.core.errors import FencedError, StreamhouseError
from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.core.model.table_state import TieringAssignment
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.tiering.maintain._maintenance import Maintainer
from streamhouse.tiering.maintain._maintenance_plan import RewriteLimits
from streamhouse.tiering.maintain._maintenance_policy import MaintenancePolicy
from streamhouse.tiering.round._lease import Lease
from streamhouse.tiering.round._round_maintenance import ClaimedMaintenance
from tests.support.examples import examples
from tests.support.faulty_catalog import (
    FaultyCatalog,
    conflict_after_landed,
    faulty_lake_catalog,
    late,
    late_by,
    lost_answer,
    lost_request,
    missing_files,
    refused,
    server_error_after_landed,
    well,
)
from tests.support.held_step import lower
from tests.support.key_table_world import KeyTableWorld
from tests.support.tiering_world import TieringWorld, rows

PATH = "db.t"
LAKE_TABLES = (PATH, f"{PATH}$changelog", f"{PATH}$batch")
TTL_S = 100
BATCH_SORT = "table.datalake.batch-layout.sort"
SNAPSHOTS = {
    "table.datalake.snapshot.max-age": "1ms",
    "table.datalake.snapshot.min-count": "1",
}
PACK = RewriteLimits(
    target_bytes=1 << 20,
    files_min=2,
    deletes_min=2,
    deleted_share_min=0.0001,
    bytes_max=1 << 30,
    is_eager=True,
)

faults = st.one_of(
    st.just(well),
    st.sampled_from(
        [refused, conflict_after_landed, lost_answer, server_error_after_landed, lost_request, late]
    ),
    st.integers(0, 12).map(late_by),
)
# So many that a worker gives up, with something still on its way.
storms = st.tuples(
    st.integers(0, 3).map(lambda count: [well] * count),
    st.one_of(st.just(late), st.integers(0, 25).map(late_by)).map(lambda fault: [fault]),
    st.lists(st.sampled_from([refused, lost_request]), min_size=4, max_size=6),
).map(lambda parts: [fault for part in parts for fault in part])


@dataclass
class Life:
    """One table and what befalls it; `keys` is there if it has a primary key."""

    tiering: TieringWorld
    keys: KeyTableWorld | None
    draw: Callable[[st.SearchStrategy[Any]], Any]
    written: int = 0
    times_ms: list[int] = field(default_factory=list)

    def write(self) -> None:
        self.tiering.service.sleep(1)
        if self.keys is not None:
            value = float(self.written)
            lines = ({"id": key, "region": f"r{key % 3}", "amount": value} for key in range(6))
            self.keys.upsert(*lines)
            self.keys.delete({"id": self.written % 6, "region": None, "amount": None})
        else:
            self.tiering.service.append(PATH, 0, rows(self.written * 4, 4))
            self.times_ms += [self.tiering.service.now_ms] * 4
        self.written += 1

    def let_time_go_by(self) -> None:
        self.tiering.service.sleep(TTL_S / 2)

    def go_wrong(self) -> None:
        FaultyCatalog.faults = self.draw(st.one_of(st.lists(faults, max_size=5), storms))
        FaultyCatalog.stale = self.draw(st.lists(st.integers(0, 3), max_size=6))

    def all_well(self) -> None:
        FaultyCatalog.faults, FaultyCatalog.stale = [], []

    def round(self) -> None:
        with self._working():
            answer = self.tiering.service.claim_tiering("test", tables=[PATH], force=True)
            if isinstance(answer, TieringAssignment):
                self.tiering.round(answer).run()

    def maintain(self) -> None:
        """All of maintenance, with no patience: of every lake table, under a claim of its own."""
        service = self.tiering.service
        with self._working():
            claimed = service.claim_tiering("test", tables=[PATH], force=True, include_idle=True)
            if not isinstance(claimed, TieringAssignment) or claimed.state.lake.snapshot_id is None:
                return
            maintenance = self._maintenance(claimed)
            policy = MaintenancePolicy.of(claimed.state.table)
            policy = replace(policy.on_demand(), rewrite=PACK, orphan_age_ms_min=0)
            for lake_table in maintenance.lake_tables:
                with contextlib.suppress(StreamhouseError):
                    maintenance.run(lake_table, policy)
            maintenance.report(keep_lease=False)

    def _maintenance(self, claimed: TieringAssignment) -> ClaimedMaintenance:
        tiering, state = self.tiering, claimed.state
        lake = tiering.lake()
        sides = {LakeRole.CHANGES: state.lake.changelog, LakeRole.BATCH: state.lake.batch}
        opened = lake.open_or_create(state.table, state.lake)
        covered = opened.covered
        if covered is None:
            raise FencedError("an old state was seen")
        return ClaimedMaintenance(
            maintainer=Maintainer(
                pins=tiering.service,
                runner=tiering.runner,
                filesystem=LakeFilesystem(tiering.catalog.properties),
                clock_ms=lambda: int(tiering.service.now_ms),
            ),
            client=tiering.service,
            lake_table=opened,
            sides=tuple(
                lake.open_or_create(state.table, known, role=role)
                for role, known in sides.items()
                if known is not None
            ),
            info=state.table,
            epoch=claimed.epoch,
            lease=Lease(
                tiering.service,
                table=PATH,
                table_id=state.table.table_id,
                epoch=claimed.epoch,
                lease_ms=60_000,
            ),
            registered=state.lake,
            tiered_offsets=covered.tiered_offsets,
        )

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """A worker that does not outlive its errors."""
        with contextlib.suppress(StreamhouseError):
            yield
        self.tiering.service.release(PATH)
        self.check_files()

    def check_files(self) -> None:
        for path in LAKE_TABLES:
            with contextlib.suppress(NoSuchTableError):
                assert missing_files(self.tiering.lake_table(path)) == []

    def settle(self) -> None:
        """All arrives that is on its way; then workers for whom all goes well do the rest."""
        FaultyCatalog.settle()
        self.check_files()
        self.write()
        for _ in range(2):
            self._catch_up()
            self.maintain()

    def _catch_up(self) -> None:
        for _ in range(10):
            answer = self.tiering.service.claim_tiering("test", tables=[PATH], force=True)
            if not isinstance(answer, TieringAssignment):
                return
            self.tiering.round(answer).run()
        raise AssertionError("rounds do not end")

    def check_rows(self, addresses: list[tuple[int, int]]) -> None:
        """Raise unless every row that must be there is, once."""
        assert len(set(addresses)) == len(addresses), "a row is there twice"
        if self.keys is not None:
            assert addresses == [(bucket, offset) for bucket, offset, _ in self.keys.live]
            return
        now_ms = self.tiering.service.now_ms
        young = {(0, n) for n, ms in enumerate(self.times_ms) if now_ms - ms < TTL_S * 1000}
        assert young <= set(addresses) <= {(0, n) for n in range(len(self.times_ms))}


def _addresses(tiering: TieringWorld, path: str) -> list[tuple[int, int]]:
    """The rows of a lake table as DuckDB reads it."""
    location = tiering.lake_table(path).metadata_location.removeprefix("file://")
    with connect() as duckdb:
        query = f"SELECT __bucket, __offset FROM iceberg_scan('{location}') ORDER BY ALL"
        return [tuple(row) for row in duckdb.execute(query).fetchall()]


@contextlib.contextmanager
def _life(folder: str, kind: str, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Iterator[Life]:
    FaultyCatalog.reset()
    catalog = faulty_lake_catalog(Path(folder))
    with KeyTableWorld(Path(folder), catalog=catalog) as world:
        life = Life(world.tiering, world if kind == "key" else None, draw)
        if kind == "key":
            more = {"table.datalake.changelog": "true"}
            world.create_key_table(properties=SNAPSHOTS | more | {BATCH_SORT: "region"})
        else:
            more = {"table.datalake.ttl": f"{TTL_S}s"}
            world.tiering.create_table(PATH, properties=SNAPSHOTS | more | {BATCH_SORT: "id"})
        # What ages are counted from is the time of the snapshots.
        life.tiering.service.sleep(time.time() - life.tiering.service.now_ms / 1000)
        yield life
    FaultyCatalog.reset()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["key", "log"])
@settings(
    max_examples=examples(3),
    deadline=None,
    # An example takes seconds: it is reported as it was found.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_no_live_file_is_deleted_and_no_row_is_lost(
    kind: str, data: st.DataObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower(monkeypatch, "landing-backoff", Backoff(first_s=0.0, most_s=0.0))
    with tempfile.TemporaryDirectory() as folder, _life(folder, kind, data.draw) as life:
        for _ in range(2):
            life.write()
            life.round()
        steps = ("write", "round", "maintain", "let_time_go_by")
        for step in data.draw(st.lists(st.sampled_from(steps), min_size=4, max_size=10)):
            life.go_wrong()
            getattr(life, step)()

        life.settle()

        life.check_rows(life.tiering.addresses(PATH))
        life.check_rows(_addresses(life.tiering, PATH))
        life.check_rows(_addresses(life.tiering, f"{PATH}$batch"))
        if life.keys is not None:
            assert life.keys.in_lake() == life.keys.live
            assert life.keys.history() == life.keys.changes
