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
import inspect
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
_R = TypeVar("_R")
_B = TypeVar("_B")


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


def _awaited(
    call: Callable[Concatenate[StreamhouseClient, _P], _T],
) -> Callable[Concatenate[AsyncStreamhouseClient, _P], Coroutine[Any, Any, _T]]:
    """Return a call of the client as a coroutine function."""

    async def awaited(self: AsyncStreamhouseClient, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await self.run(lambda: call(self.client, *args, **kwargs))

    functools.update_wrapper(awaited, call)
    return awaited


def _opened(
    call: Callable[Concatenate[StreamhouseClient, _P], _T],
    kind: Callable[[_T, AsyncStreamhouseClient], _R],
) -> Callable[Concatenate[AsyncStreamhouseClient, _P], Coroutine[Any, Any, _R]]:
    """Return a call of the client as a coroutine function; `kind` wraps the result."""

    async def opened(self: AsyncStreamhouseClient, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return kind(await self.run(lambda: call(self.client, *args, **kwargs)), self)

    functools.update_wrapper(opened, call)
    signature = inspect.signature(call).replace(return_annotation=kind)
    opened.__signature__ = signature  # type: ignore[attr-defined]
    return opened


class AsyncStreamhouseClient:
    """A connection to a Streamhouse service, for programs with an event loop.

    Has the calls of `StreamhouseClient`, awaited. Close the client, or use `async with`.

        async with AsyncStreamhouseClient() as client:
            await client.append("clicks", [{"id": 1}, {"id": 2}])
            async for batch in await client.subscribe("clicks", start="earliest"):
                print(batch.data.num_rows)

    Args:
        endpoint: the service's URL or URLs, as for `StreamhouseClient`; default:
            `STREAMHOUSE_ENDPOINT`, else http://127.0.0.1:8765.
        token: the bearer token; default: `STREAMHOUSE_TOKEN`, else none.
        timeout_s: the most time of a call, as for `StreamhouseClient`.
        ca_file: certificates of the CAs for an `https` endpoint; default:
            `STREAMHOUSE_CA_FILE`, else the machine's CAs.
        read_from: who answers lookups and scans, as for `StreamhouseClient`.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        token: str | None = None,
        timeout_s: float = 30.0,
        ca_file: str | None = None,
        read_from: str | None = None,
    ) -> None:
        self.client: Final = StreamhouseClient(
            endpoint, token=token, timeout_s=timeout_s, ca_file=ca_file, read_from=read_from
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

        For `read_range`, and for several calls in one. A cancellation breaks off the requests of
        `call`. Whether a cancelled write is stored is unknown, as after any broken connection.
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

    add_column = _awaited(StreamhouseClient.add_column)
    adopt_table = _awaited(StreamhouseClient.adopt_table)
    alter_partitioning = _awaited(StreamhouseClient.alter_partitioning)
    alter_properties = _awaited(StreamhouseClient.alter_properties)
    alter_schema = _awaited(StreamhouseClient.alter_schema)
    append = _awaited(StreamhouseClient.append)
    comment_column = _awaited(StreamhouseClient.comment_column)
    committed = _awaited(StreamhouseClient.committed)
    consumers = _awaited(StreamhouseClient.consumers)
    count = _awaited(StreamhouseClient.count)
    create_database = _awaited(StreamhouseClient.create_database)
    create_table = _awaited(StreamhouseClient.create_table)
    delete = _awaited(StreamhouseClient.delete)
    describe_table = _awaited(StreamhouseClient.describe_table)
    discard_backup = _awaited(StreamhouseClient.discard_backup)
    drop_column = _awaited(StreamhouseClient.drop_column)
    drop_database = _awaited(StreamhouseClient.drop_database)
    drop_not_null = _awaited(StreamhouseClient.drop_not_null)
    drop_table = _awaited(StreamhouseClient.drop_table)
    fetch = _awaited(StreamhouseClient.fetch)
    forget_consumer = _awaited(StreamhouseClient.forget_consumer)
    keep_rejected = _awaited(StreamhouseClient.keep_rejected)
    lake_catalog = _awaited(StreamhouseClient.lake_catalog)
    lake_divergence = _awaited(StreamhouseClient.lake_divergence)
    list_databases = _awaited(StreamhouseClient.list_databases)
    list_tables = _awaited(StreamhouseClient.list_tables)
    lookup = _awaited(StreamhouseClient.lookup)
    lookup_one = _awaited(StreamhouseClient.lookup_one)
    move_table = _awaited(StreamhouseClient.move_table)
    offsets_for_timestamp = _awaited(StreamhouseClient.offsets_for_timestamp)
    pin_snapshot = _awaited(StreamhouseClient.pin_snapshot)
    pinned_snapshots = _awaited(StreamhouseClient.pinned_snapshots)
    positions = _awaited(StreamhouseClient.positions)
    prefix_lookup = _awaited(StreamhouseClient.prefix_lookup)
    query = _awaited(StreamhouseClient.query)
    read = _awaited(StreamhouseClient.read)
    rename_column = _awaited(StreamhouseClient.rename_column)
    replay_rejected = _awaited(StreamhouseClient.replay_rejected)
    report_position = _awaited(StreamhouseClient.report_position)
    shards = _awaited(StreamhouseClient.shards)
    stage_backup = _awaited(StreamhouseClient.stage_backup)
    status = _awaited(StreamhouseClient.status)
    table_sizes = _awaited(StreamhouseClient.table_sizes)
    table_state = _awaited(StreamhouseClient.table_state)
    transactions = _awaited(StreamhouseClient.transactions)
    unpin_snapshot = _awaited(StreamhouseClient.unpin_snapshot)
    upsert = _awaited(StreamhouseClient.upsert)
    wait_tiered = _awaited(StreamhouseClient.wait_tiered)
    widen_column = _awaited(StreamhouseClient.widen_column)

    begin_transaction = _opened(StreamhouseClient.begin_transaction, AsyncTransaction)
    open_transaction = _opened(StreamhouseClient.open_transaction, AsyncTransaction)
    scan = _opened(StreamhouseClient.scan, AsyncScan)
    subscribe = _opened(StreamhouseClient.subscribe, AsyncSubscription[Any])


def _wake(loop: asyncio.AbstractEventLoop, ready: asyncio.Event) -> None:
    # A loop that has ended has no waiting task.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(ready.set)
