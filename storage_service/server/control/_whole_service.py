"""Answers of one process for all shards: the joint status, and the list of shards."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.ownership.shards.owners import Owner
from streamhouse.storage_service.server.http.http_exchange import HttpExchange
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.server.shards.other_shards import ShardState
from streamhouse.storage_service.server.shards.peers import HANDED_ON, HttpPeers, PeerRequest
from streamhouse.storage_service.server.status._status import CONSUMERS_BRIEF_MAX, lateness

__all__ = ["shards_of_all", "status_of_all"]

_logger = logging.getLogger(__name__)

_FIGURES_TIMEOUT_S: Final = 3.0
_LISTS: Final = ("tables", "damaged_tables", "strangers", "workers", "idle_workers")


async def status_of_all(
    service: Service,
    exchange: HttpExchange,
    *,
    is_brief: bool = False,
    table: TablePath | None = None,
) -> str:
    """Return the joint status of all shards; `shards` also lists shards that do not answer.

    With `table` the status has only this table.
    """
    sampler = service.status
    own_status = sampler.text_of(table) if table else await sampler.text(is_brief=is_brief)
    shards = service.shards
    if shards is None or exchange.header(HANDED_ON) is not None:
        return own_status
    query = exchange.scope["query_string"].decode("latin-1")
    target = f"/v1/status?{query}" if query else "/v1/status"
    request = PeerRequest.of("GET", target, exchange.scope["headers"])
    states = await shards.states()

    other_shards = [state for state in states if state.shard != shards.own]
    answered = {
        shards.own: json.loads(own_status),
        **await _answers_of(shards.peers, other_shards, request),
    }
    shown = [
        {
            **state.to_json(),
            "answers": state.shard in answered,
            "service": answered.get(state.shard, {}).get("service"),
        }
        for state in states
    ]
    return json.dumps({**_joined(answered), "shards": shown}, separators=(",", ":"))


async def shards_of_all(service: Service, exchange: HttpExchange) -> list[dict[str, Any]]:
    """Return every shard, with the figures of the journal if the owner answers soon."""
    shards = service.shards
    if shards is None:
        return []
    if exchange.header(HANDED_ON) is not None:
        return [{"shard": shards.own, "journal": shards.figures()}]
    states = await shards.states()
    other_shards = [state for state in states if state.shard != shards.own]
    headers = exchange.scope["headers"]
    request = PeerRequest.of("GET", "/v1/shards", headers, timeout_s=_FIGURES_TIMEOUT_S)
    journals: dict[str, Any] = {shards.own: shards.figures()}
    for shard, answer in (await _answers_of(shards.peers, other_shards, request)).items():
        entries = answer.get("shards")
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and entry.get("shard") == shard:
                journals[shard] = entry.get("journal")
    return [{**state.to_json(), "journal": journals.get(state.shard)} for state in states]


async def _answers_of(
    peers: HttpPeers, states: Sequence[ShardState], request: PeerRequest
) -> dict[str, dict[str, Any]]:
    """Return the answers of the shards' owners by shard, without shards that do not answer."""

    async def ask(owner: Owner | None) -> dict[str, Any] | None:
        # The address of a dead owner may belong to anybody by now: no token is sent to the address.
        if owner is None or not owner.is_live or owner.endpoint is None:
            return None
        try:
            answer = await peers.ask(owner.endpoint, request)
            status = json.loads(answer.body)
        except (StreamhouseError, ValueError) as error:
            _logger.info("event=shard_unreachable endpoint=%s why=%r", owner.endpoint, str(error))
            return None
        return status if answer.status == 200 and isinstance(status, dict) else None

    answers = await asyncio.gather(*(ask(state.owner) for state in states))
    return {
        state.shard: answer
        for state, answer in zip(states, answers, strict=True)
        if answer is not None
    }


def _joined(answered: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Join the lists of all shards; entries get their shard, other fields are of the first."""
    joined = dict(next(iter(answered.values())))
    for name in _LISTS:
        joined[name] = [
            {**entry, "shard": shard} if isinstance(entry, dict) else f"{shard}: {entry}"
            for shard, status in answered.items()
            for entry in status.get(name, [])
        ]
    joined["tables"].sort(key=lambda table: str(table["table"]))
    consumers = {shard: status.get("consumers") or {} for shard, status in answered.items()}
    if any(consumers.values()):
        worst = [
            {**entry, "shard": shard}
            for shard, of in consumers.items()
            for entry in of.get("worst", [])
        ]
        joined["consumers"] = {
            "count": sum(int(of.get("count", 0)) for of in consumers.values()),
            "worst": sorted(worst, key=lateness)[:CONSUMERS_BRIEF_MAX],
        }
    joined["table_count"] = sum(int(s.get("table_count", 0)) for s in answered.values())
    return joined
