"""Random requests of Kafka clients, as every kind of caller; judged as those by HTTP are."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from kio.schema.errors import ErrorCode

from streamhouse.storage_service.kafka_door._apis import APIS
from tests.attack.judge import Violation
from tests.support.kafka_world import KafkaClient
from tests.support.random_requests import DrawnRequest, RandomRequests

__all__ = ["attack_kafka"]

_HANDSHAKE: Final = 17
_AUTHENTICATE: Final = 36


async def attack_kafka(
    address: str,
    chance: random.Random,
    *,
    tokens: Mapping[str, str | None],
    topics: Mapping[str, Sequence[str]],
    hidden: Mapping[str, bytes],
    secret: bytes,
    requests_each: int,
    statuses: Counter[str],
) -> int:
    """Send `requests_each` requests per API; return how many. Raises `Violation`.

    A caller has a token or None, and topics that its requests are about. Its answers never have
    `secret`, nor what is `hidden` from it, unless it had named that itself.
    """
    sent = 0
    for _ in range(requests_each * len(APIS)):
        caller = chance.choice(sorted(tokens))
        drawn = RandomRequests(chance, topics[caller])
        outcome, asked, answer = await _ask(address, tokens[caller], drawn)
        said = f"{caller}: {asked!r}: {answer[:500]!r}"
        if secret in answer:
            raise Violation(f"an answer has a secret: {said}")
        mark = hidden.get(caller)
        if mark is not None and mark in answer and mark not in asked.data:
            raise Violation(f"somebody saw a guarded table: {said}")
        statuses[f"{caller} kafka-{outcome}"] += 1
        sent += 1
    return sent


async def _ask(
    address: str, token: str | None, drawn: RandomRequests
) -> tuple[str, DrawnRequest, bytes]:
    """Show a token, if there is one, send a request, and return what came until the end."""
    request = drawn.draw(1)
    client = await KafkaClient.connect(address)
    try:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            if token is not None:
                await client.call(_HANDSHAKE, 1, mechanism="PLAIN")
                shown = await client.call(_AUTHENTICATE, 1, auth_bytes=f"\0me\0{token}".encode())
                if shown.error_code is not ErrorCode.none:
                    return "refused", request, b""
            client.writer.write(request.data)
            if request.is_answered and not request.is_damaged:
                return "answered", request, await client.frame()
            client.writer.write_eof()
            async with asyncio.timeout(60):
                return "read", request, await client.reader.read()
    except TimeoutError as error:
        raise Violation(f"no answer, and no end of the connection: {request!r}") from error
    finally:
        await client.close()
    return "closed", request, b""
