"""A table that is dropped and made again: whoever holds a position in the first one is refused.

Each door takes a position of a table of five rows, which is then dropped and made again with as
many. None of them may answer rows of the second table, or wait for some, or write.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from streamhouse import AsyncStreamhouseClient, StreamhouseClient
from streamhouse.client import StorageClient, Subscription, Transaction
from streamhouse.core.errors import (
    CommitConflictError,
    InvalidRequestError,
    TableNotFoundError,
)
from streamhouse.core.model.offsets import Offset
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

ROWS: Final = 5
Door = Callable[[StorageClient, str], Callable[[], Any]]
"""Takes a position in a table; what it returns goes on from there."""


def _reading(client: StorageClient) -> StreamhouseClient:
    reader = StreamhouseClient.__new__(StreamhouseClient)
    reader.__dict__ = vars(client)
    return reader


def _iterated(client: StorageClient, path: str, **options: Any) -> Callable[[], Any]:
    subscription = _reading(client).subscribe(path, **options)
    next(subscription)
    return lambda: next(subscription)


def _polled(client: StorageClient, path: str) -> Callable[[], Any]:
    subscription = client.subscribe(path, start="earliest")
    subscription.poll()
    return lambda: subscription.poll(timeout_s=30)


def _committed(client: StorageClient, path: str) -> Callable[[], Any]:
    subscription = client.subscribe(path, start="committed", consumer="billing")
    subscription.poll()
    return subscription.commit


def _of_several(client: StorageClient, path: str) -> Callable[[], Any]:
    client.create_table(f"{path}_other", "id BIGINT", if_not_exists=True)
    subscription = client.subscribe([path, f"{path}_other"], start="earliest")
    subscription.poll()
    return lambda: subscription.poll(timeout_s=30)


def _awaited(client: StorageClient, path: str) -> Callable[[], Any]:
    async def follow(steps: list[Callable[[], Any]]) -> None:
        async with AsyncStreamhouseClient(client.endpoint) as own:
            subscription = await own.subscribe(path, start="earliest")
            await anext(subscription)
            steps.pop()()
            await anext(subscription)

    return lambda: asyncio.run(follow([lambda: _recreate(client, path)]))


def _fetched(client: StorageClient, path: str) -> Callable[[], Any]:
    (batch,) = client.fetch(path, 0, 0)
    return lambda: client.fetch(path, 0, batch.end_offset)


def _counted(client: StorageClient, path: str) -> Callable[[], Any]:
    """Who counts rows by itself has an offset of the same table."""
    (batch,) = client.fetch(path, 0, 0)
    return lambda: client.fetch(path, 0, batch.base_offset + 3)


def _known(client: StorageClient, path: str) -> Callable[[], Any]:
    """A plain number is an offset of the table as the client knows it."""
    own = StorageClient(client.endpoint)
    own.describe_table(path)
    return lambda: own.fetch(path, 0, 3)


def _written(client: StorageClient, path: str) -> Callable[[], Any]:
    start, end = client.append(path, [{"id": 9}])[0]
    return lambda: list(client.read_range(path, 0, start, end))


def _from_positions(
    go_on: Callable[[StorageClient, str, dict[int, int]], Any],
) -> Door:
    def door(client: StorageClient, path: str) -> Callable[[], Any]:
        ends = {b: at.high_watermark for b, at in client.positions(path).items()}
        return lambda: go_on(client, path, ends)

    return door


def _transacted(client: StorageClient, path: str, ends: Mapping[int, int]) -> None:
    with client.begin_transaction(path) as transaction:
        transaction.commit([transaction.stage([{"id": 7}])], read_offsets=ends)


def _since(client: StorageClient, path: str) -> Callable[[], Any]:
    offsets = client.offsets_for_timestamp(path, 0)
    return lambda: next(client.subscribe(path, start=offsets))


def _of_table(client: StorageClient, path: str) -> Callable[[], Any]:
    table_id = client.describe_table(path).table_id
    return lambda: client.offsets_for_timestamp(path, 0, table_id=table_id)


def _as_json(client: StorageClient, path: str) -> Callable[[], Any]:
    kept = f'{{"table_id": {client.describe_table(path).table_id}, "offsets": {{"0": 3}}}}'
    return lambda: next(client.subscribe(path, start=kept))


def _last_commit(client: StorageClient, path: str) -> Callable[[], Any]:
    client.report_position(path, "c", {0: 2})
    offsets = client.committed(path, "c")
    return lambda: next(client.subscribe(path, start=offsets))


def _tiered(client: StorageClient, path: str) -> Callable[[], Any]:
    subscription = _reading(client).subscribe(path, start="full")
    token = next(subscription).token
    return lambda: next(_reading(client).subscribe(path, start=token))


DOORS: Final[Mapping[str, Door]] = {
    "subscribe": lambda c, path: _iterated(c, path, start="earliest"),
    "subscribe, from a number": lambda c, path: _iterated(c, path, start={0: 2}),
    "subscribe, full": lambda c, path: _iterated(c, path, start="full"),
    "subscribe, a token": _tiered,
    "subscribe, JSON that was kept": _as_json,
    "subscribe, since a time": _since,
    "subscribe, several tables": _of_several,
    "poll": _polled,
    "commit": _committed,
    "async": _awaited,
    "fetch": _fetched,
    "fetch, counted": _counted,
    "fetch, a number": _known,
    "read_range": _written,
    "committed": _last_commit,
    "report_position": _from_positions(lambda c, path, at: c.report_position(path, "c", at)),
    "table_state": _from_positions(lambda c, path, at: c.table_state(path, after=at)),
    "begin_reading": _from_positions(
        lambda c, path, at: (c.begin_reading(path, at), c.fetch(path, 0, at[0]))
    ),
    "fingerprint_at": lambda c, path: (
        lambda table_id: lambda: c.fingerprint_at(path, 0, 3, table_id=table_id)
    )(c.describe_table(path).table_id),
    "offsets_for_timestamp": _of_table,
    "read": _from_positions(lambda c, path, at: _reading(c).read(path, startingOffsets=at)),
    "scan": _from_positions(
        lambda c, path, at: list(_reading(c).scan(f"{path}$log", endingOffsets=at))
    ),
    "count": _from_positions(lambda c, path, at: _reading(c).count(path, startingOffsets=at)),
    "commit, read_offsets": _from_positions(_transacted),
}


def _create(client: StorageClient, path: str) -> None:
    client.create_table(path, "id BIGINT")
    client.append(path, [{"id": i} for i in range(ROWS)])


def _recreate(client: StorageClient, path: str) -> None:
    client.drop_table(path)
    _create(client, path)


@pytest.fixture(scope="module")
def client(service: ServiceProcess) -> Iterator[StorageClient]:
    with StorageClient(service.endpoint) as opened:
        yield opened


@pytest.mark.parametrize("name", DOORS)
def test_a_position_in_a_dropped_table_is_refused(client: StorageClient, name: str) -> None:
    path = f"made_again.t{list(DOORS).index(name)}"
    _create(client, path)
    go_on = DOORS[name](client, path)
    if name != "async":
        _recreate(client, path)

    with pytest.raises((TableNotFoundError, CommitConflictError), match="dropped and created ag"):
        go_on()

    assert client.positions(path)[0].high_watermark == ROWS


OF_OFFSETS: Final = {"offset", "offsets", "start", "end", "end_offset", "after", "read_offsets"}
# That of a column is no offset, and of workers' calls it is given with the table's id.
NO_DOORS: Final = {"add_column", "compare_history"}


def test_every_call_with_an_offset_is_a_door_above() -> None:
    calls = {
        name
        for kind in (StreamhouseClient, StorageClient, Subscription, Transaction)
        for name, call in inspect.getmembers(kind, callable)
        if not name.startswith("_") and OF_OFFSETS & inspect.signature(call).parameters.keys()
    }
    assert calls - NO_DOORS <= {name.partition(",")[0] for name in DOORS}
    assert {"commit", "fetch", "subscribe", *NO_DOORS} <= calls


def test_a_commit_takes_no_plain_numbers_for_what_was_read(client: StorageClient) -> None:
    _create(client, "made_again.plain")
    with client.begin_transaction("made_again.plain") as transaction:
        part = transaction.stage([{"id": 7}])
        with pytest.raises(InvalidRequestError, match=r"read_offsets are plain .*client.positions"):
            transaction.commit([part], read_offsets={0: ROWS})
        with pytest.raises(InvalidRequestError, match="of two tables"):
            transaction.commit([part], read_offsets={0: Offset(1, 1), 1: Offset(1, 2)})

    assert client.positions("made_again.plain")[0].high_watermark == ROWS


def test_the_documented_loop_loses_no_update_of_a_table_made_again(client: StorageClient) -> None:
    schema = "item BIGINT NOT NULL, left BIGINT"
    client.create_table("made_again.stock", schema, primary_key="item")
    client.upsert("made_again.stock", [{"item": 1, "left": 10}])
    tries = 0
    while True:
        positions = client.positions("made_again.stock")
        read = {bucket: at.high_watermark for bucket, at in positions.items()}
        left = client.lookup_one("made_again.stock", item=1)["left"]
        if not tries:
            client.drop_table("made_again.stock")
            client.create_table("made_again.stock", schema, primary_key="item", bucket_count=2)
            client.upsert("made_again.stock", [{"item": 1, "left": 500}])
        tries += 1
        with client.begin_transaction("made_again.stock", operation="upsert") as transaction:
            part = transaction.stage([{"item": 1, "left": left - 3}])
            try:
                transaction.commit([part], read_offsets=read)
                break
            except CommitConflictError:
                continue

    assert (tries, client.lookup_one("made_again.stock", item=1)["left"]) == (2, 497)


def _batch_of(client: StorageClient, path: str, stream: str, number: int, app_id: str) -> None:
    with client.begin_transaction(path, app_id=app_id, version=number, source=stream) as begun:
        begun.commit([begun.stage([{"id": number}])])


def test_a_stream_that_wrote_the_dropped_table_is_refused_also_after_a_restart(
    tmp_path: Path,
) -> None:
    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        client.create_database("made_again")
        for path in ("made_again.sink", "made_again.other"):
            _create(client, path)
            _batch_of(client, path, "stream-1", 0, "stream-1")
        _batch_of(client, "made_again.sink", "stream-2", 0, "nightly")
        client.drop_table("made_again.sink")
        service.kill()
    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        _create(client, "made_again.sink")
        for stream, app_id in (("stream-1", "stream-1"), ("stream-2", "nightly")):
            with pytest.raises(InvalidRequestError, match=rf"after stream {stream} .*new checkpo"):
                _batch_of(client, "made_again.sink", stream, 1, app_id)
        assert client.positions("made_again.sink")[0].high_watermark == ROWS

        # Its other table goes on, and so does the application with another checkpoint.
        _batch_of(client, "made_again.other", "stream-1", 1, "stream-1")
        _batch_of(client, "made_again.sink", "stream-3", 0, "nightly")
        assert client.positions("made_again.sink")[0].high_watermark == ROWS + 1
