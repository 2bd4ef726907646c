"""One request of a Kafka client that is being answered."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

from kio.schema.errors import ErrorCode

from streamhouse.core.errors import StreamhouseError, UnauthorizedError
from streamhouse.storage_service.kafka.groups.coordinator import GroupKey
from streamhouse.storage_service.kafka.messages.requests import RequestHeader, response_class
from streamhouse.storage_service.kafka_door._api import Api, ConnectionEnded
from streamhouse.storage_service.kafka_door._error_codes import error_code_of
from streamhouse.storage_service.kafka_door.broker._broker import Broker
from streamhouse.storage_service.kafka_door.broker._producers import RefusedPlaces
from streamhouse.storage_service.kafka_door.broker._read_tables import ReadTables
from streamhouse.storage_service.kafka_door.broker._shard_calls import Whereabouts
from streamhouse.storage_service.server.caller import UNKNOWN
from streamhouse.storage_service.server.http.answer_memory import AnswerHold
from streamhouse.storage_service.server.http.fair_shares import SHARE
from streamhouse.storage_service.server.http.http_exchange import ClientGone, Tenure

__all__ = ["Client", "KafkaExchange"]

_logger = logging.getLogger(__name__)

_METHOD: Final = "KAFKA"
# A request has room for thousands of topics that are refused, and each of them would be a line.
_REPORTED_MAX: Final = 100


class Client(Protocol):
    """The connection that a request came by."""

    address: str
    token: bytes | None
    """What the client has shown, if it was asked."""
    has_shaken_hands: bool
    """Whether it has said by which mechanism it shows that."""
    is_gone: bool
    waiting: set[asyncio.Future[None]]
    """Woken when the client goes away."""
    fetches: Iterator[int]
    """Numbers of the fetches that have come by it: each begins with another partition."""
    members: dict[GroupKey, str]
    """The member that has joined a group by it last, or was given an id to join with."""
    read_tables: ReadTables
    """Which tables it has read by it."""
    refused: RefusedPlaces
    """What it is to send again before what comes behind that."""


class KafkaExchange:
    """See the module. What Service's parts ask of a request is `server/exchange.py`."""

    method = _METHOD
    caller = UNKNOWN
    share = ""
    hold: AnswerHold | None = None
    tenure: Tenure | None = None
    is_last = False
    """Whether the connection is closed after the answer."""
    error = ErrorCode.none
    """Of several errors in an answer the first one; metrics count by it."""

    def __init__(
        self,
        broker: Broker,
        client: Client,
        header: RequestHeader,
        api: Api,
        *,
        request_id: str,
    ) -> None:
        self.broker = broker
        self.service = broker.service
        self.whereabouts = Whereabouts(broker.service)
        self.client = client
        self.header = header
        self.api = api
        self.request_id = request_id
        self.route = f"kafka_{api.name}"
        self.path = api.name
        """What an audit line names; a handler adds the topic that is refused."""
        self._reported: Counter[str] = Counter()
        # Whether the rows of the request before were handed over, or refused by an answer.
        self._turn: asyncio.Future[bool] | None = None
        self._next_turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def api_version(self) -> int:
        """The version of the API that the client speaks."""
        return self.header.api_version

    @property
    def client_id(self) -> str:
        """What the client calls itself."""
        return self.header.client_id

    @property
    def client_address(self) -> str:
        """The address that the connection comes from."""
        return self.client.address

    @property
    def has_answer_field(self) -> frozenset[str]:
        """The fields that an answer of this version has at its top."""
        kind: Any = response_class(self.header.api_key, self.header.api_version)
        return frozenset(kind.__dataclass_fields__)

    def peer_headers(self) -> Mapping[str, str]:
        """Return the headers that show the caller's token to another shard."""
        token = self.client.token
        return {} if token is None else {"authorization": f"Bearer {token.decode('latin-1')}"}

    def note(self, error: ErrorCode) -> None:
        """Say which error the answer has, for metrics."""
        if self.error is ErrorCode.none:
            self.error = error

    def admit(self) -> None:
        """Set who asks, as it is now: a token that was revoked ends its connections.

        Members that have joined by it are out of their groups at once: others get their parts.
        Raises `ConnectionEnded`.
        """
        access = self.service.access
        caller = access.caller_of(self.client.token or b"")
        if caller is None and not self.api.is_open:
            refusal = UnauthorizedError(
                "this service needs a token: give it as the password of SASL/PLAIN, with any user"
                " name"
            )
            self.note(error_code_of(refusal))
            self.report(refusal)
            self.broker.groups.put_out(self.client.members)
            raise ConnectionEnded(refusal.message)
        self.caller = caller or UNKNOWN
        self.share = access.share_of(self.caller, self.client_address)
        SHARE.set(self.share)

    def report(self, error: StreamhouseError) -> None:
        """Count an error that the answer has; of each kind the first ones are logged, too."""
        self._reported[error.code] += 1
        if self._reported[error.code] <= _REPORTED_MAX:
            self.service.report(self, error)
        else:
            self.service.metrics.errors.labels(error.code).inc()

    def end_report(self) -> None:
        """Log how many errors were not: a line in place of one for each."""
        for code, count in self._reported.items():
            if count > _REPORTED_MAX:
                _logger.warning(
                    "event=errors_not_logged request_id=%s client=%s token_name=%s route=%s"
                    " code=%s count=%d logged=%d",
                    *(self.request_id, self.client_address, self.caller.name, self.route),
                    *(code, count, _REPORTED_MAX),
                )

    async def wait(self, waiter: asyncio.Future[None]) -> None:
        """Await `waiter`; raises `ClientGone` if the client goes away meanwhile.

        Afterwards the caller may have other grants; raises as `admit`.
        """
        if self.client.is_gone:
            raise ClientGone
        self.client.waiting.add(waiter)
        try:
            await waiter
        finally:
            self.client.waiting.discard(waiter)
        if self.client.is_gone:
            raise ClientGone
        self.admit()

    def release(self) -> None:
        """Hold no memory for an answer any more."""
        if self.hold is not None:
            self.hold.release()
            self.hold = None

    # -- the order of writes ---------------------------------------------------------------------

    def come_after(self, earlier: KafkaExchange) -> None:
        """Say which request of the connection comes before this one."""
        self._turn = earlier._next_turn

    async def my_turn(self) -> None:
        """Return when every earlier request of the connection has handed its rows over.

        Decoding may end in another order; rows of one connection are stored in that of requests.
        Raises `ConnectionEnded` if one of them never will: what comes behind it is not taken first,
        since clients that get no answer send all of it again, in order.
        """
        if self._turn is not None and not await self._turn:
            raise ConnectionEnded("a request before this one has ended the connection")

    def pass_turn(self) -> None:
        """Let the next request hand its rows over; the answer to this request does so, too."""
        if not self._next_turn.done():
            self._next_turn.set_result(True)

    def break_turn(self) -> None:
        """Let no later request hand rows over, unless this one has: it ends without an answer."""
        if not self._next_turn.done():
            self._next_turn.set_result(False)
