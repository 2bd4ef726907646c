"""Maintenance on demand: of one table, under a claim of its own, or only as a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from streamhouse.client import StorageClient, TieringIdle
from streamhouse.core.errors import (
    FencedError,
    NotFoundError,
    StreamhouseError,
    UnavailableError,
)
from streamhouse.core.model.lake.facts import LakeCatalog, LakeRole
from streamhouse.core.model.table import TablePath
from streamhouse.core.model.table_state import TableState, TieringAssignment
from streamhouse.lake.commits.committer import IcebergLakeTable
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.lake_tables import IcebergLake
from streamhouse.tiering._ports import TaskRunner
from streamhouse.tiering.maintain._maintenance import Maintainer
from streamhouse.tiering.maintain._maintenance_policy import MaintenancePolicy
from streamhouse.tiering.maintain.maintenance_report import MaintenancePlan, MaintenanceReport
from streamhouse.tiering.round._lease import Lease
from streamhouse.tiering.round._round_maintenance import ClaimedMaintenance
from streamhouse.tiering.worker._service import new_worker_id

__all__ = ["maintain_table", "plan_table", "why_nothing"]

# Each pass reads at most four gigabytes; more passes mean that rows arrive faster than packing.
PASSES_MAX: Final = 10_000


def maintain_table(
    client: StorageClient, catalog: LakeCatalog, runner: TaskRunner, path: str
) -> Iterator[tuple[str, MaintenanceReport]]:
    """Run every helpful step on the lake tables of `path`; yield each pass with its lake table.

    Raises:
        UnavailableError: a tiering worker has the table now.
        StreamhouseError: a step failed; the table is right, and the steps before are done.
    """
    with _opened(catalog) as lake:
        _lake_state(client, path)
        answer = client.claim_tiering(new_worker_id(), tables=[path], force=True, include_idle=True)
        if isinstance(answer, TieringIdle):
            raise UnavailableError(
                f"table '{path}' cannot be maintained now: {answer.reason}; try again in"
                f" {max(1, answer.retry_after_ms // 1000)} s"
            )
        maintenance = _claimed(client, lake, runner, answer)
        policy = MaintenancePolicy.of(answer.state.table).on_demand()
        with maintenance.lease:
            try:
                for lake_table in maintenance.lake_tables:
                    for _ in range(PASSES_MAX):
                        report = maintenance.run(lake_table, policy)
                        yield lake_table.name, report
                        if not report.has_more:
                            break
            finally:
                with contextlib.suppress(StreamhouseError):
                    maintenance.report(keep_lease=False)


def why_nothing(state: TableState) -> str:
    """Return why the table has nothing to maintain; empty if the table may have."""
    if state.lake.snapshot_id is None:
        return "no row of it is in the lake yet"
    if not state.table.properties().datalake_enabled:
        return "its tiering is off (table.datalake.enabled is false)"
    return ""


def _claimed(
    client: StorageClient, lake: IcebergLake, runner: TaskRunner, claim: TieringAssignment
) -> ClaimedMaintenance:
    """Open the lake tables; when that fails, the claim is given back."""
    state = claim.state
    path = str(state.table.path)
    try:
        lake_table, *sides = _open(lake, state)
        covered = lake_table.covered
        if covered is None or covered.epoch > claim.epoch:
            raise FencedError(
                f"lake table '{path}' was rolled back or advanced by another worker; run"
                " 'streamhouse tier --once' to see which"
            )
    except StreamhouseError as error:
        with contextlib.suppress(StreamhouseError):
            client.fail_tiering(
                path,
                table_id=state.table.table_id,
                epoch=claim.epoch,
                error=f"{error.code}: {error}",
            )
        raise
    return ClaimedMaintenance(
        maintainer=_maintainer(client, lake, runner),
        client=client,
        lake_table=lake_table,
        sides=tuple(sides),
        info=state.table,
        epoch=claim.epoch,
        lease=Lease(
            client,
            table=path,
            table_id=state.table.table_id,
            epoch=claim.epoch,
            lease_ms=claim.lease_ms,
        ),
        registered=state.lake,
        tiered_offsets=covered.tiered_offsets,
    )


def plan_table(
    client: StorageClient, catalog: LakeCatalog, runner: TaskRunner, path: str
) -> list[tuple[str, MaintenancePlan]]:
    """Return the first pass of `maintain_table` for each lake table; changes nothing."""
    with _opened(catalog) as lake:
        state = _lake_state(client, path)
        policy = MaintenancePolicy.of(state.table).on_demand()
        maintainer = _maintainer(client, lake, runner)
        rows, *sides = _open(lake, state)
        expired = rows.expired_offsets
        return [
            (
                lake_table.name,
                maintainer.plan(lake_table, policy, path=path, expired_offsets=expired),
            )
            for lake_table in (rows, *sides)
        ]


def _open(lake: IcebergLake, state: TableState) -> list[IcebergLakeTable]:
    """Return the lake table of the rows, and the existing side tables."""
    sides = ((LakeRole.CHANGES, state.lake.changelog), (LakeRole.BATCH, state.lake.batch))
    return [
        lake.open_or_create(state.table, state.lake),
        *(
            lake.open_or_create(state.table, side, role=role)
            for role, side in sides
            if side is not None
        ),
    ]


def _lake_state(client: StorageClient, path: str) -> TableState:
    state = client.table_state(str(TablePath.parse(path)))
    if state.lake.snapshot_id is None:
        raise NotFoundError(f"table '{path}' has no lake table yet; 'streamhouse tier' makes it")
    return state


def _maintainer(client: StorageClient, lake: IcebergLake, runner: TaskRunner) -> Maintainer:
    return Maintainer(pins=client, runner=runner, filesystem=LakeFilesystem(lake.file_properties))


@contextlib.contextmanager
def _opened(catalog: LakeCatalog) -> Iterator[IcebergLake]:
    lake = IcebergLake(catalog)
    try:
        yield lake
    finally:
        lake.close()
