"""A request of a Kafka client, while being answered."""

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
from streamhouse.storage_service.kafka_door.broker._shard_calls import TableLocations
from streamhouse.storage_service.server.caller import UNKNOWN
from streamhouse.storage_service.server.http.answer_memory import AnswerHold
from streamhouse.storage_service.server.http.fair_shares import SHARE
from streamhouse.storage_service.server.http.http_exchange import ClientGone, Tenure

__all__ = ["Client", "KafkaExchange"]

_logger = logging.getLogger(__name__)

_METHOD: Final = "KAFKA"
# A request has room for thousands of refused topics, each of which would be one line.
_REPORTED_MAX: Final = 100


class Client(Protocol):
    """The connection of a request."""

    address: str
    token: bytes | None
    """The client's password, if the service requires tokens."""
    has_shaken_hands: bool
    """Whether the client has chosen a SASL mechanism."""
    is_gone: bool
    waiting: set[asyncio.Future[None]]
    """Woken when the client goes away."""
    fetches: Iterator[int]
    """Numbers the connection's fetches: each fetch begins with another partition."""
    members: dict[GroupKey, str]
    """The latest member of each group that joined, or got an id, on this connection."""
    read_tables: ReadTables
    """The tables that were read on this connection."""
    refused: RefusedPlaces
    """The refused batches that the client has to send again before any later batch."""


class KafkaExchange:
    """See the module. `server/exchange.py` has the service's needs."""

    method = _METHOD
    caller = UNKNOWN
    share = ""
    hold: AnswerHold | None = None
    tenure: Tenure | None = None
    is_last = False
    """Whether the connection is closed after the answer."""
    error = ErrorCode.none
    """The first error in the answer, for metrics."""

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
        self.table_locations = TableLocations(broker.service)
        self.client = client
        self.header = header
        self.api = api
        self.request_id = request_id
        self.route = f"kafka_{api.name}"
        self.path = api.name
        """The subject of an audit line; a handler adds the refused topic."""
        self._reported: Counter[str] = Counter()
        # Resolves to whether the previous request handed its rows over, or was refused by an
        # answer.
        self._turn: asyncio.Future[bool] | None = None
        self._next_turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def api_version(self) -> int:
        """The client's version of the API."""
        return self.header.api_version

    @property
    def client_id(self) -> str:
        """The client's own name."""
        return self.header.client_id

    @property
    def client_address(self) -> str:
        """The client's address."""
        return self.client.address

    @property
    def has_answer_field(self) -> frozenset[str]:
        """The top-level fields of an answer in this version."""
        kind: Any = response_class(self.header.api_key, self.header.api_version)
        return frozenset(kind.__dataclass_fields__)

    def peer_headers(self) -> Mapping[str, str]:
        """Return the headers with the caller's token for another shard."""
        token = self.client.token
        return {} if token is None else {"authorization": f"Bearer {token.decode('latin-1')}"}

    def note(self, error: ErrorCode) -> None:
        """Record the answer's error for metrics."""
        if self.error is ErrorCode.none:
            self.error = error

    def admit(self) -> None:
        """Set the present caller: a revoked token ends the token's connections.

        Members of the connection leave their groups at once, which frees the partitions. Raises
        `ConnectionEnded`.
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
        """Count an error of the answer, and log the first errors of each kind."""
        self._reported[error.code] += 1
        if self._reported[error.code] <= _REPORTED_MAX:
            self.service.report(self, error)
        else:
            self.service.metrics.errors.labels(error.code).inc()
            self.service.count_broken(error)

    def end_report(self) -> None:
        """Log the number of errors beyond the limit of `report`."""
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
        """Release the memory of the answer."""
        if self.hold is not None:
            self.hold.release()
            self.hold = None

    # -- the order of writes ---------------------------------------------------------------------

    def come_after(self, earlier: KafkaExchange) -> None:
        """Set the preceding request of the connection."""
        self._turn = earlier._next_turn

    async def my_turn(self) -> None:
        """Return when every earlier request of the connection has handed its rows over.

        Decoding may end in another order, but rows are stored in the order of the requests. Raises
        `ConnectionEnded` if an earlier request fails without an answer: the client then sends all
        unanswered requests again, in order, and no later request may be stored first.
        """
        if self._turn is not None and not await self._turn:
            raise ConnectionEnded("an earlier request has ended the connection")

    def pass_turn(self) -> None:
        """Let the next request hand its rows over; an answer to this request does the same."""
        if not self._next_turn.done():
            self._next_turn.set_result(True)

    def break_turn(self) -> None:
        """Let no later request hand rows over, unless this request has: there will be no answer."""
        if not self._next_turn.done():
            self._next_turn.set_result(False)
