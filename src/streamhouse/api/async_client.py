"""The client for programs with an event loop: the same calls, awaited.

Each call is a call of `StreamhouseClient` on one of a bounded number of threads;
`docs/decisions/0024-the-async-client-runs-the-calls-of-the-other.md` says why.

Invariants:
- both clients share the code: retries, routes and messages are the same
- a cancelled call ends at once, and closes its connection, which may have half an answer
- a batch of a subscription is taken in the loop's own thread, so that no cancellation loses a batch
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, TypeVar

import pyarrow as pa

from streamhouse.api.client import StreamhouseClient
from streamhouse.client import (
    STOP,
    CommitResult,
    StopSignal,
    Subscription,
    Transaction,
    TransactionStatus,
    poll_now,
)
from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.threads import Pool

if TYPE_CHECKING:
    from streamhouse.client.values.forms import Rows
    from streamhouse.reading.plan.pinned_table import TableScan

__all__ = ["AsyncScan", "AsyncStreamhouseClient", "AsyncSubscription", "AsyncTransaction"]

CALLS_MAX: Final = 32
"""Calls under way at a time; further calls wait for their turn."""

_P = ParamSpec("_P")
_T = TypeVar("_T")
_B = TypeVar("_B")


def _awaited(
    call: Callable[Concatenate[StreamhouseClient, _P], _T],
) -> Callable[Concatenate[AsyncStreamhouseClient, _P], Coroutine[Any, Any, _T]]:
    """Return a call of the client as a coroutine function."""

    async def awaited(self: AsyncStreamhouseClient, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await self.run(lambda: call(self.client, *args, **kwargs))

    functools.update_wrapper(awaited, call)
    return awaited


class AsyncStreamhouseClient:
    """A connection to a Streamhouse service, for programs with an event loop.

    Has the arguments and calls of `StreamhouseClient`. Close it, or use it in `async with`.

        async with AsyncStreamhouseClient() as client:
            await client.append("clicks", [{"id": 1}, {"id": 2}])
            async for batch in await client.subscribe("clicks", start="earliest"):
                print(batch.data.num_rows)
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        token: str | None = None,
        timeout_s: float = 30.0,
        ca_file: str | None = None,
    ) -> None:
        self.client: Final = StreamhouseClient(
            endpoint, token=token, timeout_s=timeout_s, ca_file=ca_file
        )
        """The blocking client behind the calls."""
        self._is_closed = False
        self._threads = Pool("streamhouse-async", CALLS_MAX)

    def __repr__(self) -> str:
        return f"Async{self.client!r}"

    async def __aenter__(self) -> AsyncStreamhouseClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the subscriptions, let calls under way end, close the connections; idempotent.

        Calls that still wait for their turn are refused.
        """
        self._is_closed = True
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self.client.close()

    async def run(self, call: Callable[[], _T]) -> _T:
        """Run `call`, which may block on calls of `client`, and return its result.

        For calls that this class lacks. A cancellation breaks off the requests of `call`. Whether a
        cancelled write is stored is unknown, as after any broken connection.
        """
        if self._is_closed:
            raise self._refusal()
        stop = StopSignal()
        context = contextvars.copy_context()
        context.run(STOP.set, stop)
        waiting = self._threads.submit(lambda: context.run(call))
        try:
            return await asyncio.wrap_future(waiting)
        except asyncio.CancelledError:
            stop.set()
            task = asyncio.current_task()
            # The call had not begun when the client was closed; nobody cancelled its task.
            if waiting.cancelled() and not (task and task.cancelling()):
                raise self._refusal() from None
            raise

    def _refusal(self) -> InvalidRequestError:
        return InvalidRequestError(
            f"the client of {self.client.endpoint} is closed; make another one"
        )

    list_databases = _awaited(StreamhouseClient.list_databases)
    create_database = _awaited(StreamhouseClient.create_database)
    create_table = _awaited(StreamhouseClient.create_table)
    drop_table = _awaited(StreamhouseClient.drop_table)
    list_tables = _awaited(StreamhouseClient.list_tables)
    describe_table = _awaited(StreamhouseClient.describe_table)
    positions = _awaited(StreamhouseClient.positions)
    wait_tiered = _awaited(StreamhouseClient.wait_tiered)
    committed = _awaited(StreamhouseClient.committed)
    append = _awaited(StreamhouseClient.append)
    upsert = _awaited(StreamhouseClient.upsert)
    delete = _awaited(StreamhouseClient.delete)
    fetch = _awaited(StreamhouseClient.fetch)
    lookup = _awaited(StreamhouseClient.lookup)
    prefix_lookup = _awaited(StreamhouseClient.prefix_lookup)

    async def lookup_one(self, path: str, **key: Any) -> dict[str, Any] | None:
        """Return the row with this key, or None, as `StreamhouseClient.lookup_one` does."""
        return await self.run(lambda: self.client.lookup_one(path, **key))

    async def read(self, path: str, **options: Any) -> pa.Table:
        """Return a table's rows as of one instant, as `StreamhouseClient.read` does."""
        return await self.run(lambda: self.client.read(path, **options))

    async def count(self, path: str, **options: Any) -> int:
        """Count a table's rows as of one instant, as `StreamhouseClient.count` does."""
        return await self.run(lambda: self.client.count(path, **options))

    async def query(
        self,
        statement: str,
        args: Sequence[Any] | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> pa.Table:
        """Return the rows of a SELECT in DuckDB's SQL, as `StreamhouseClient.query` does."""
        return await self.run(lambda: self.client.query(statement, args, **options))

    async def scan(self, path: str, **options: Any) -> AsyncScan:
        """Read a table's rows batch after batch, as `StreamhouseClient.scan` does."""
        return AsyncScan(await self.run(lambda: self.client.scan(path, **options)), self)

    async def subscribe(self, path: str | Sequence[str], **options: Any) -> AsyncSubscription[Any]:
        """Follow a table, or several, as `StreamhouseClient.subscribe` does; `async for` it."""

        def subscribed() -> Subscription[Any]:
            subscription: Subscription[Any] = self.client.subscribe(path, **options)
            return subscription

        return AsyncSubscription(await self.run(subscribed), self)

    async def begin_transaction(self, path: str, **options: Any) -> AsyncTransaction:
        """Begin a transaction, as `StreamhouseClient.begin_transaction` does."""
        transaction = await self.run(lambda: self.client.begin_transaction(path, **options))
        return AsyncTransaction(transaction, self)


class AsyncScan:
    """A table's rows as they come, in bounded memory: `async for` over it, in `async with`.

    Rows come once. A scan whose wait for a batch was cancelled has lost that batch, and ends.
    """

    def __init__(self, scan: TableScan, client: AsyncStreamhouseClient) -> None:
        self.schema: Final[pa.Schema] = scan.schema
        """The Arrow schema of every batch."""
        self._scan = scan
        self._client = client
        # A cancelled wait may still be reading when the next wait, or `aclose`, begins.
        self._turn = threading.Lock()
        self._is_broken = False

    def __repr__(self) -> str:
        return f"Async{self._scan!r}"

    async def __aenter__(self) -> AsyncScan:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncScan:
        return self

    async def __anext__(self) -> pa.RecordBatch:
        """Wait for the next batch."""
        try:
            batch = await self._client.run(self._next)
        except asyncio.CancelledError:
            self._is_broken = True
            raise
        if batch is None:
            raise StopAsyncIteration
        return batch

    async def aclose(self) -> None:
        """End the reading; afterwards nothing is open and no row is in memory."""
        await asyncio.to_thread(self._close)

    def _next(self) -> pa.RecordBatch | None:
        with self._turn:
            if self._is_broken:
                self._scan.close()
            # A closed scan raises a sentence.
            return next(self._scan, None)

    def _close(self) -> None:
        with self._turn:
            self._scan.close()


class AsyncSubscription(Generic[_B]):
    """Batches of tables as they become durable: `async for` over it, one task at a time."""

    def __init__(self, subscription: Subscription[_B], client: AsyncStreamhouseClient) -> None:
        self._subscription = subscription
        self._client = client
        self._ready = asyncio.Event()
        wake = functools.partial(_wake, asyncio.get_running_loop(), self._ready)
        subscription.on_ready(wake)

    def __repr__(self) -> str:
        return f"Async{self._subscription!r}"

    async def __aenter__(self) -> AsyncSubscription[_B]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncSubscription[_B]:
        return self

    async def __anext__(self) -> _B:
        """Wait for the next batch; the iteration ends when the subscription is closed."""
        # Other tasks get their turn also while batches are always ready.
        await asyncio.sleep(0)
        while not self._subscription.is_closed:
            # Cleared before the poll: a batch that arrives in between sets it again.
            self._ready.clear()
            try:
                batch = poll_now(self._subscription)
            except BaseException:
                await self.aclose()
                raise
            if batch is not None:
                return batch
            if not self._subscription.is_closed:
                await self._ready.wait()
        raise StopAsyncIteration

    @property
    def is_closed(self) -> bool:
        """Whether the subscription has ended: by `aclose`, by the client's `aclose`, or by a
        failure.
        """
        return self._subscription.is_closed

    async def commit(self) -> None:
        """Report every batch delivered so far as read; durable on return."""
        await self._client.run(self._subscription.commit)

    async def aclose(self) -> None:
        """End the subscription and all waits for batches."""
        await asyncio.to_thread(self._subscription.close)


class AsyncTransaction:
    """A transaction of one table; the end of `async with` aborts an uncommitted transaction."""

    def __init__(self, transaction: Transaction, client: AsyncStreamhouseClient) -> None:
        self.transaction: Final = transaction
        """The blocking transaction behind the calls."""
        self._client = client

    def __repr__(self) -> str:
        return f"Async{self.transaction!r}"

    async def __aenter__(self) -> AsyncTransaction:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self._client.run(lambda: self.transaction.__exit__(kind, error, trace))

    async def stage(self, data: Rows) -> str:
        """Store rows durably but invisibly; return the name of the part for `commit`."""
        return await self._client.run(lambda: self.transaction.stage(data))

    async def commit(
        self,
        parts: Sequence[str],
        *,
        read_offsets: Mapping[int, int] | None = None,
        isolation: str = "snapshot",
        timeout_s: float = 600.0,
    ) -> CommitResult:
        """Make the named rows visible at one instant, all or none, as `Transaction.commit` does."""
        return await self._client.run(
            lambda: self.transaction.commit(
                parts, read_offsets=read_offsets, isolation=isolation, timeout_s=timeout_s
            )
        )

    async def abort(self) -> TransactionStatus:
        """Drop the staged rows; return the status, which is not `aborted` after a commit."""
        return await self._client.run(self.transaction.abort)


def _wake(loop: asyncio.AbstractEventLoop, ready: asyncio.Event) -> None:
    # A loop that has ended has no waiting task.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(ready.set)
