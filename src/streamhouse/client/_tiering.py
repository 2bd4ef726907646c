"""The calls of tiering workers: claim a table, keep the claim, report."""

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
    """No table to tier now, with the reason and the time until the next request in milliseconds."""

    reason: str
    retry_after_ms: int


class TieringCalls:
    """The calls of `StorageClient` that tiering workers make."""

    _transport: HttpTransport
    _claim_urls: tuple[str, ...] = ()
    """The shards of the service's last answer, in the order in which claims try them."""

    def claim_tiering(
        self,
        worker_id: str,
        *,
        tables: Sequence[str] | None = None,
        force: bool = False,
        include_idle: bool = False,
    ) -> TieringAssignment | TieringIdle:
        """Claim a table to tier; the shards of a service are asked in turn.

        Args:
            worker_id: names the worker in messages of the service.
            tables: only these; None means any.
            force: also tables that are still fresh enough.
            include_idle: also tables with all rows in the lake, for maintenance.
        """
        body = {
            "worker_id": worker_id,
            "tables": None if tables is None else list(tables),
            "force": force,
            "include_idle": include_idle,
        }
        routes = self._transport.routes
        urls_to_ask, asked_urls = dict.fromkeys(self._claim_urls or ("",)), set[str]()
        idle: list[TieringIdle] = []
        last_error: StreamhouseError | None = None
        while urls_to_ask:
            url = next(iter(urls_to_ask))
            del urls_to_ask[url]
            asked_urls.add(url)
            try:
                answer = self._claim_at(url, body)
            except (NotFoundError, UnavailableError) as error:
                # Other shards have tables, too.
                last_error = error
                continue
            # The asked process may be gone; then another process has answered.
            url = routes.of("", table=_claim_route(url))
            asked_urls.add(url)
            urls_to_ask.pop(url, None)
            shard_urls = [routes.endpoints.resolve(shard) for shard in answer.get("shards", ())]
            other_urls = [shard for shard in shard_urls if shard is not None and shard != url]
            self._claim_urls = (*other_urls, url) if other_urls else ()
            if answer["assignment"] is not None:
                assignment = TieringAssignment.from_json(answer["assignment"])
                if other_urls:
                    routes.learn(str(assignment.state.table.path), url)
                return assignment
            idle.append(
                TieringIdle(reason=answer["reason"], retry_after_ms=int(answer["retry_after_ms"]))
            )
            urls_to_ask |= dict.fromkeys(shard for shard in other_urls if shard not in asked_urls)
        if not idle and last_error is not None:
            self._claim_urls = ()
            raise last_error
        return min(idle, key=lambda answer: answer.retry_after_ms)

    def _claim_at(self, url: str, body: dict[str, Any]) -> Any:
        """Claim at one shard; an empty `url` means any process of the service."""
        route = _claim_route(url)
        if route:
            self._transport.routes.learn(route, url)
        # A claim whose answer was lost ends with its lease, as the claim of a dead worker does.
        return self._transport.request_json(
            "POST", "/v1/tiering/claim", body=body, is_repeatable=True, table=route
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
        """Keep the claim, and with a `step` report the round's progress.

        Raises:
            FencedError: another worker has taken over.
            TableNotFoundError: the table was dropped, even if a new table has the name.
        """
        body: dict[str, Any] = {"table": str(path), "table_id": table_id, "epoch": epoch}
        if step:
            body |= {"step": step, "rows_done": rows_done, "rows_planned": rows_planned}
        self._transport.request_json(
            "POST", "/v1/tiering/heartbeat", body=body, is_repeatable=True, table=str(path)
        )

    def complete_tiering(self, path: str, report: TieringReport) -> LakeState:
        """Register a committed lake snapshot; repeating the call changes nothing.

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
        """Return bucket -> the log's fingerprint at the offset, where the log has a fingerprint.

        Raises `HistoryDivergedError` when a lake table covers rows that are not in the log's
        history; the service then remembers the divergence, and stops writes and tiering of the
        table.
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
        return {int(b): str(fingerprint) for b, fingerprint in answer["fingerprints"].items()}

    def check_lake_history(self, path: str, covered: CoveredOffsets, *, table_id: int) -> None:
        """Raise `HistoryDivergedError` when a lake table's rows are not of this log's history."""
        self._transport.request_json(
            "POST",
            f"/v1/tables/{TablePath.parse(path)}/lake/history",
            body={"table_id": table_id, **covered.to_json()},
            is_repeatable=True,
        )

    def look_at_lake(self, path: str) -> LakeState:
        """Have the service register other engines' new commits to the lake table."""
        return LakeState.from_json(
            self._transport.request_json(
                "POST",
                f"/v1/tables/{TablePath.parse(path)}/lake/look",
                body={},
                is_repeatable=True,
            )
        )

    def fail_tiering(self, path: str, *, table_id: int, epoch: int, error: str) -> None:
        """Release the claim after a failed round; the service pauses before the next claim."""
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


def _claim_route(url: str) -> str:
    """Return the routes' key for claims at one shard; no table has such a name."""
    return f"claims at {url}" if url else ""
