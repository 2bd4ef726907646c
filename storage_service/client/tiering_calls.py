"""What a tiering worker asks of the service: claim a table, stay its owner, report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamhouse.storage_service.client.transport import HttpTransport
from streamhouse.storage_service.model.lake import LakeDebt, LakeState, SideLakeState
from streamhouse.storage_service.model.lake_coverage import CoveredOffsets
from streamhouse.storage_service.model.table import TablePath
from streamhouse.storage_service.model.table_state import TieringAssignment

__all__ = ["TieringCalls", "TieringIdle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TieringIdle:
    """No table to tier now: why, and when to ask again, in milliseconds."""

    reason: str
    retry_after_ms: int


class TieringCalls:
    """The tiering half of the client."""

    _transport: HttpTransport

    def claim_tiering(
        self,
        worker_id: str,
        *,
        tables: Sequence[str] | None = None,
        force: bool = False,
        include_idle: bool = False,
    ) -> TieringAssignment | TieringIdle:
        """Ask for a table to tier.

        Args:
            worker_id: names the worker in messages of the service.
            tables: only these; None means any.
            force: also tables that are still fresh enough.
            include_idle: also tables whose rows are all in the lake, to maintain that.
        """
        answer = self._transport.request_json(
            "POST",
            "/v1/tiering/claim",
            body={
                "worker_id": worker_id,
                "tables": None if tables is None else list(tables),
                "force": force,
                "include_idle": include_idle,
            },
        )
        if answer["assignment"] is not None:
            return TieringAssignment.from_json(answer["assignment"])
        return TieringIdle(reason=answer["reason"], retry_after_ms=int(answer["retry_after_ms"]))

    def heartbeat_tiering(
        self, path: str, *, epoch: int, step: str = "", rows_done: int = 0, rows_planned: int = 0
    ) -> None:
        """Keep the claim, and with a `step` tell how far the round is.

        Raises `FencedError` when another worker has taken over.
        """
        body: dict[str, Any] = {"table": str(path), "epoch": epoch}
        if step:
            body |= {"step": step, "rows_done": rows_done, "rows_planned": rows_planned}
        self._transport.request_json("POST", "/v1/tiering/heartbeat", body=body, is_repeatable=True)

    def complete_tiering(
        self,
        path: str,
        *,
        table_id: int,
        epoch: int,
        lake_snapshot_id: int,
        lake_table_uuid: str,
        tiered_offsets: Mapping[int, int],
        changelog: SideLakeState | None = None,
        batch: SideLakeState | None = None,
        keep_lease: bool = False,
        debt: LakeDebt | None = None,
        truncated_offsets: Mapping[int, int] | None = None,
        expired_offsets: Mapping[int, int] | None = None,
        maintenance_due_us: int | None = None,
        fingerprints: Mapping[int, str] | None = None,
    ) -> LakeState:
        """Register a committed lake snapshot; repeating it changes nothing.

        `changelog` is the snapshot of the table's full history, `batch` that of its batch layout;
        without one that stays as it is. With `keep_lease` the claim goes on, and ends with a call
        without it. `debt` is what the lake table is made of, for people to look at. Below
        `truncated_offsets` the snapshot has no rows any more, because they were overwritten;
        without them that stays as it is. No read finds rows below `expired_offsets` any more; those
        of a bucket never go back. At `maintenance_due_us` the table wants to be claimed even if no
        more rows come to it. `fingerprints` are what the snapshot says of the log that its rows
        came from.

        Raises:
            FencedError: `epoch` is not the current one.
            HistoryDivergedError: the snapshot has other rows than the log.
        """
        answer = self._transport.request_json(
            "POST",
            "/v1/tiering/complete",
            body={
                "table": str(path),
                "table_id": table_id,
                "epoch": epoch,
                "lake_snapshot_id": str(lake_snapshot_id),
                "lake_table_uuid": lake_table_uuid,
                "tiered_offsets": {str(b): end for b, end in tiered_offsets.items()},
                "changelog": None if changelog is None else changelog.to_json(),
                "batch": None if batch is None else batch.to_json(),
                "keep_lease": keep_lease,
                "debt": None if debt is None else debt.to_json(),
                "truncated_offsets": None
                if truncated_offsets is None
                else {str(b): start for b, start in truncated_offsets.items()},
                "maintenance_due_us": maintenance_due_us,
                "expired_offsets": {str(b): end for b, end in (expired_offsets or {}).items()},
                "fingerprints": {str(b): said for b, said in (fingerprints or {}).items()},
            },
            is_repeatable=True,
        )
        return LakeState.from_json(answer)

    def compare_history(
        self,
        path: str,
        *,
        table_id: int,
        covered: CoveredOffsets | None = None,
        offsets: Mapping[int, int] | None = None,
    ) -> dict[int, str]:
        """Return bucket -> the log's fingerprint at its offset, of the buckets that have one there.

        Raises `HistoryDivergedError` when what a lake table covers is not the log's history; the
        service remembers that, and the table is not written to or tiered any more.
        """
        answer = self._transport.request_json(
            "POST",
            "/v1/tiering/history",
            body={
                "table": str(path),
                "table_id": table_id,
                "lake": None if covered is None else covered.to_json(),
                "offsets": {str(b): offset for b, offset in (offsets or {}).items()},
            },
            is_repeatable=True,
        )
        return {int(b): str(said) for b, said in answer["fingerprints"].items()}

    def check_lake_history(self, path: str, covered: CoveredOffsets) -> None:
        """Raise `HistoryDivergedError` when what a lake table covers is not the log's history."""
        self._transport.request_json(
            "POST",
            f"/v1/tables/{TablePath.parse(path)}/lake/history",
            body=covered.to_json(),
            is_repeatable=True,
        )

    def fail_tiering(self, path: str, *, epoch: int, error: str) -> None:
        """Give the claim back after a failed round; the service waits before it hands it out."""
        self._transport.request_json(
            "POST",
            "/v1/tiering/fail",
            body={"table": str(path), "epoch": epoch, "error": error[:2_000]},
            is_repeatable=True,
        )
