"""What a tiering worker asks of the service: claim a table, stay its owner, report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamhouse.client.http._transport import HttpTransport
from streamhouse.core.errors import (
    NotFoundError,
    StreamhouseError,
    UnavailableError,
)
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.offsets import buckets_to_json
from streamhouse.core.model.table import TablePath
from streamhouse.core.model.table_state import TieringAssignment, TieringReport

__all__ = ["TieringCalls", "TieringIdle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TieringIdle:
    """No table to tier now: why, and when to ask again, in milliseconds."""

    reason: str
    retry_after_ms: int


class TieringCalls:
    """The calls of `StorageClient` that tiering workers make."""

    _transport: HttpTransport
    _claim_urls: tuple[str, ...] = ()
    """The shards, as one of them has said last; who was asked last comes last."""

    def claim_tiering(
        self,
        worker_id: str,
        *,
        tables: Sequence[str] | None = None,
        force: bool = False,
        include_idle: bool = False,
    ) -> TieringAssignment | TieringIdle:
        """Ask for a table to tier: of several shards one after the other, in turn.

        Args:
            worker_id: names the worker in messages of the service.
            tables: only these; None means any.
            force: also tables that are still fresh enough.
            include_idle: also tables whose rows are all in the lake, to maintain that.
        """
        body = {
            "worker_id": worker_id,
            "tables": None if tables is None else list(tables),
            "force": force,
            "include_idle": include_idle,
        }
        routes = self._transport.routes
        left, asked = dict.fromkeys(self._claim_urls or ("",)), set[str]()
        idle: list[TieringIdle] = []
        away: StreamhouseError | None = None
        while left:
            url = next(iter(left))
            del left[url]
            asked.add(url)
            try:
                answer = self._claim_at(url, body)
            except (NotFoundError, UnavailableError) as error:
                # The others have tables, too.
                away = error
                continue
            # Who was asked may be gone, and another one have answered.
            url = routes.of("", table=_turn(url))
            asked.add(url)
            left.pop(url, None)
            told = [routes.endpoints.told(shard) for shard in answer.get("shards", ())]
            others = [shard for shard in told if shard is not None and shard != url]
            self._claim_urls = (*others, url) if others else ()
            if answer["assignment"] is not None:
                assignment = TieringAssignment.from_json(answer["assignment"])
                if others:
                    routes.learn(str(assignment.state.table.path), url)
                return assignment
            idle.append(
                TieringIdle(reason=answer["reason"], retry_after_ms=int(answer["retry_after_ms"]))
            )
            left |= dict.fromkeys(shard for shard in others if shard not in asked)
        if not idle and away is not None:
            self._claim_urls = ()
            raise away
        return min(idle, key=lambda answer: answer.retry_after_ms)

    def _claim_at(self, url: str, body: dict[str, Any]) -> Any:
        """Claim at one shard; an empty `url` is any process of the service."""
        turn = _turn(url)
        if turn:
            self._transport.routes.learn(turn, url)
        # A claim whose answer was lost ends with its lease, as that of a worker that died.
        return self._transport.request_json(
            "POST", "/v1/tiering/claim", body=body, is_repeatable=True, table=turn
        )

    def heartbeat_tiering(
        self,
        path: str,
        *,
        table_id: int,
        epoch: int,
        step: str = "",
        rows_done: int = 0,
        rows_planned: int = 0,
    ) -> None:
        """Keep the claim, and with a `step` tell how far the round is.

        Raises:
            FencedError: another worker has taken over.
            TableNotFoundError: the table was dropped; another one may have its name.
        """
        body: dict[str, Any] = {"table": str(path), "table_id": table_id, "epoch": epoch}
        if step:
            body |= {"step": step, "rows_done": rows_done, "rows_planned": rows_planned}
        self._transport.request_json(
            "POST", "/v1/tiering/heartbeat", body=body, is_repeatable=True, table=str(path)
        )

    def complete_tiering(self, path: str, report: TieringReport) -> LakeState:
        """Register a committed lake snapshot; repeating it changes nothing.

        Raises:
            FencedError: the report's epoch is not the current one.
            HistoryDivergedError: the snapshot has other rows than the log.
        """
        answer = self._transport.request_json(
            "POST",
            "/v1/tiering/complete",
            body={"table": str(path), **report.to_json()},
            is_repeatable=True,
            table=str(path),
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
                "offsets": buckets_to_json(offsets or {}),
            },
            is_repeatable=True,
            table=str(path),
        )
        return {int(b): str(said) for b, said in answer["fingerprints"].items()}

    def check_lake_history(self, path: str, covered: CoveredOffsets, *, table_id: int) -> None:
        """Raise `HistoryDivergedError` when what a lake table covers is not this log's history."""
        self._transport.request_json(
            "POST",
            f"/v1/tables/{TablePath.parse(path)}/lake/history",
            body={"table_id": table_id, **covered.to_json()},
            is_repeatable=True,
        )

    def look_at_lake(self, path: str) -> LakeState:
        """Have the service register what other engines committed to the lake table since."""
        return LakeState.from_json(
            self._transport.request_json(
                "POST",
                f"/v1/tables/{TablePath.parse(path)}/lake/look",
                body={},
                is_repeatable=True,
            )
        )

    def fail_tiering(self, path: str, *, table_id: int, epoch: int, error: str) -> None:
        """Give the claim back after a failed round; the service waits before it hands it out."""
        self._transport.request_json(
            "POST",
            "/v1/tiering/fail",
            body={
                "table": str(path),
                "table_id": table_id,
                "epoch": epoch,
                "error": error[:2_000],
            },
            is_repeatable=True,
            table=str(path),
        )


def _turn(url: str) -> str:
    """Return what the routes know claims at one shard by; no table has such a name."""
    return f"claims at {url}" if url else ""
