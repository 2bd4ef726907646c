"""SASL/PLAIN: the password is a token of the service, the user name is whatever the client says.

    authorization id | 0 | user name | 0 | password

A wrong password is answered, and the connection closed. Where the service asks for no token, any
user name and password will do, and none is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from streamhouse.core.errors import UnauthorizedError
from streamhouse.storage_service.kafka_door._exchange import KafkaExchange

__all__ = ["answer_sasl_authenticate", "answer_sasl_handshake"]

PLAIN: Final = "PLAIN"
_PARTS: Final = 3
# A pause for each attempt against guessing; a connection has one attempt.
_REFUSAL_S: Final = 0.1


async def answer_sasl_handshake(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Answer whether the mechanism is offered."""
    if request.mechanism == PLAIN:
        exchange.client.has_shaken_hands = True
        return {"mechanisms": [PLAIN]}
    exchange.note(ErrorCode.unsupported_sasl_mechanism)
    return {"error_code": ErrorCode.unsupported_sasl_mechanism, "mechanisms": [PLAIN]}


async def answer_sasl_authenticate(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Keep the client's token if valid."""
    if not exchange.client.has_shaken_hands:
        return _refused(exchange, ErrorCode.illegal_sasl_state, "SaslHandshake comes first")
    parts = bytes(request.auth_bytes).split(b"\0")
    caller = None
    if len(parts) == _PARTS:
        exchange.path = f"{exchange.api.name} {parts[1][:100].decode('utf-8', 'replace')}"
        caller = exchange.service.access.caller_of(parts[2])
    if caller is None:
        message = "the password is no token of this service"
        exchange.report(UnauthorizedError(message))
        await asyncio.sleep(_REFUSAL_S)
        return _refused(exchange, ErrorCode.sasl_authentication_failed, message)
    # An open service ignores passwords, and other shards do not need a token either.
    exchange.client.token = None if exchange.service.access.is_open else parts[2]
    exchange.caller = caller
    return {}


def _refused(exchange: KafkaExchange, code: ErrorCode, message: str) -> Mapping[str, Any]:
    exchange.note(code)
    exchange.is_last = True
    return {"error_code": code, "error_message": message}
