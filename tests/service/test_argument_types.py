"""A value of a wrong type is refused by a sentence that names the argument, in every public call.

The calls are found, not listed: a new call is tested, too.
"""

from __future__ import annotations

import asyncio
import datetime
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from streamhouse import AppendWriter, AsyncStreamhouseClient, Producer, StreamhouseClient
from streamhouse.client import StorageClient
from streamhouse.core.errors import InvalidRequestError, StreamhouseError, UnknownOptionError
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

WRONG: Final[tuple[Any, ...]] = (None, 5, [1], object())
TABLE: Final = "shop.orders"
# Argument -> a value that every call takes.
RIGHT: Final[dict[str, Any]] = {
    "bucket": 0,
    "call": print,
    "changes": [{"add": "w", "type": "long"}],
    "comment": "",
    "confirm": "v",
    "consumer": "billing",
    "data": {"id": 1, "v": "a"},
    "data_type": "bigint",
    "end": 0,
    "holder": "backup",
    "id": 1,
    "keys": {"id": 1},
    "name": "v",
    "new_name": "w",
    "offset": 0,
    "offsets": {0: 0},
    "partitioned_by": [],
    "parts": [],
    "path": TABLE,
    "schema": "id BIGINT",
    "shard": "other",
    "snapshot_id": 1,
    "start": 0,
    "statement": "SELECT 1",
    "timestamp_us": 1_700_000_000_000_000,
    "transaction_id": "0" * 32,
    "ttl_s": 1,
}
# A number is right here, or the table has the last word.
NUMBERS: Final = [
    "after_ms",
    "batch_rows",
    "bucket",
    "bucket_count",
    "buffer_bytes",
    "delivery_timeout_s",
    "end",
    "end_offset",
    "linger_ms",
    "limit",
    "max_block_s",
    "max_bytes",
    "max_in_flight",
    "max_wait_ms",
    "offset",
    "page_bytes",
    "schema_id",
    "snapshot_id",
    "start",
    "table_id",
    "timeout_s",
    "timestamp_us",
    "ttl_s",
    "version",
    "writer_id",
]
# The sentence says in other words which argument is wrong.
OTHER_WORDS: Final = {
    "data": "takes rows as|row 0 is",
    "keys": "takes rows as|row 0 is",
    "data_type": "its type must be",
    "args": "query:",
}
SKIPPED: Final = ("__init__", "close", "aclose", "run")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamhouseClient]:
    with (
        ServiceProcess(tmp_path_factory.mktemp("types")) as service,
        StreamhouseClient(service.endpoint) as opened,
    ):
        opened.create_table(TABLE, "id BIGINT NOT NULL, v STRING", primary_key="id")
        yield opened


def _subjects(client: StreamhouseClient) -> dict[str, Any]:
    return {
        "client": client,
        "transaction": client.begin_transaction(TABLE, operation="upsert"),
        "subscription": client.subscribe(TABLE),
        "producer": Producer(client, TABLE, operation="upsert"),
        "writer": AppendWriter(),
    }


SUBJECTS: Final = ("client", "transaction", "subscription", "producer", "writer")


@pytest.mark.parametrize("subject_name", SUBJECTS)
def test_every_call_names_the_argument_of_a_wrong_type(
    client: StreamhouseClient, subject_name: str
) -> None:
    subject = _subjects(client)[subject_name]
    calls = [
        (name, getattr(subject, name))
        for name, call in inspect.getmembers(type(subject), inspect.isfunction)
        if not name.startswith("_") and name not in SKIPPED
    ]

    assert _faults(calls) == []


def test_the_constructors_name_the_argument(client: StreamhouseClient) -> None:
    def producer(**arguments: Any) -> None:
        Producer(**{"client": client, "path": TABLE, "operation": "upsert", **arguments}).close()

    calls: list[tuple[str, Callable[..., Any]]] = [
        ("StreamhouseClient", StreamhouseClient),
        ("AsyncStreamhouseClient", AsyncStreamhouseClient),
        ("AppendWriter", AppendWriter),
        ("Producer", _with_signature(producer, Producer)),
    ]

    assert _faults(calls) == []


def test_the_async_client_refuses_in_the_same_words(client: StreamhouseClient) -> None:
    async def refusals() -> list[str]:
        async with AsyncStreamhouseClient(client.endpoint) as opened:
            transaction = await opened.begin_transaction(TABLE, operation="upsert")
            subscription = await opened.subscribe(TABLE)
            of_any_type: Any = transaction.commit
            calls: list[tuple[str, Callable[[], Any]]] = [
                ("path", lambda: opened.read(_any(None))),
                ("consumer", lambda: opened.committed(TABLE, _any(5))),
                ("parts", lambda: of_any_type(object())),
                ("timeout_s", lambda: of_any_type([], timeout_s="1")),
            ]
            sentences = []
            for argument, call in calls:
                with pytest.raises(StreamhouseError, match=f"^{argument} is ") as refused:
                    await call()
                sentences.append(refused.value.message)
            await subscription.aclose()
            return sentences

    assert len(asyncio.run(refusals())) == 4


def test_one_part_may_be_named_alone(client: StreamhouseClient) -> None:
    with client.begin_transaction(TABLE, operation="upsert") as transaction:
        result = transaction.commit(_any(transaction.stage({"id": 7, "v": "g"})))

    assert result.row_count == 1


def test_a_key_of_a_wrong_type_is_named_with_its_column(client: StreamhouseClient) -> None:
    client.create_table("shop.items", "item STRING NOT NULL, n INT", primary_key="item")

    with pytest.raises(StreamhouseError) as refused:
        client.lookup_one("shop.items", item=5)

    assert "column 'item'" in refused.value.message
    assert "string" in refused.value.message
    assert "bytes" not in refused.value.message


def _any(value: object) -> Any:
    return value


def _faults(calls: list[tuple[str, Callable[..., Any]]]) -> list[str]:
    faults = []
    for name, call in calls:
        parameters = [
            p
            for p in inspect.signature(call).parameters.values()
            if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        for parameter in parameters:
            for value in WRONG:
                may_be_none = value is None and parameter.default is None
                may_be_number = value == 5 and parameter.name in NUMBERS
                if may_be_none or may_be_number or parameter.annotation in ("Any", "object"):
                    continue
                arguments = {p.name: RIGHT[p.name] for p in parameters if p.default is p.empty}
                if name == "lookup_one":
                    arguments["id"] = 1
                fault = _fault(call, {**arguments, parameter.name: value}, parameter.name)
                faults += [f"{name}({parameter.name}={value!r}): {fault}"] if fault else []
    return faults


def _fault(call: Callable[..., Any], arguments: dict[str, Any], argument: str) -> str:
    words = [argument, *OTHER_WORDS.get(argument, "").split("|")]
    try:
        result = call(**arguments)
        if inspect.isgenerator(result):
            list(result)
    except StreamhouseError as error:
        is_named = any(word and word in error.message for word in words)
        return "" if is_named else f"does not name it: {error.message}"
    except Exception as error:  # noqa: BLE001 - any other error is the fault
        return repr(error)
    return f"is taken: {result!r:.80}"


def _with_signature(call: Callable[..., Any], like: type) -> Callable[..., Any]:
    signature = inspect.signature(like)
    parameters = [p for name, p in signature.parameters.items() if name not in ("client", "path")]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call


@pytest.mark.parametrize("call", ["read", "scan", "count", "query"])
def test_an_unknown_argument_is_answered_with_those_of_python(
    client: StreamhouseClient, call: str
) -> None:
    with pytest.raises(UnknownOptionError) as refused:
        getattr(client, call)(TABLE, colums=["id"])

    assert f"{call} has no argument 'colums'" in refused.value.message
    assert "asOfTimestamp" in refused.value.message
    assert "endpoint" not in refused.value.message


def test_an_argument_of_another_call_is_named_with_the_call(client: StreamhouseClient) -> None:
    with pytest.raises(UnknownOptionError, match=r"read has no argument 'limit'; client.scan has"):
        client.read(TABLE, limit=5)


@pytest.mark.parametrize("call", ["read", "query"])
def test_a_time_zone_is_refused_where_no_time_needs_it(
    client: StreamhouseClient, call: str
) -> None:
    argument = TABLE if call == "read" else f"SELECT * FROM {TABLE}"

    with pytest.raises(InvalidRequestError, match="'timeZone' = 'Paris' is not a time zone"):
        getattr(client, call)(argument, timeZone="Paris")
    with pytest.raises(InvalidRequestError, match="option 'timeZone' is empty"):
        getattr(client, call)(argument, timeZone=None)


@pytest.mark.parametrize("zone", ["+02:00", "Z", "PST", "GMT-3", "Europe/Paris"])
def test_a_query_takes_the_zones_of_a_read(client: StreamhouseClient, zone: str) -> None:
    noon = "SELECT TIMESTAMPTZ '2026-01-31 12:00:00+00' AS moment"

    shown = client.query(f"SELECT hour(moment) AS h FROM ({noon})", timeZone=zone)["h"].to_pylist()

    hours = {"+02:00": 14, "Z": 12, "PST": 4, "GMT-3": 9, "Europe/Paris": 13}
    assert shown == [hours[zone]]


@pytest.mark.parametrize("name", ["information_schema.tables", "pg_catalog.pg_tables"])
def test_a_query_does_not_show_the_tables_of_duckdb(client: StreamhouseClient, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"client.list_tables\(\)"):
        client.query(f"SELECT * FROM {name}")


NOW_S: Final = 1_795_000_000


@pytest.mark.parametrize("mistake", [1, NOW_S, NOW_S * 1_000, NOW_S * 10**9, -1])
def test_a_time_in_another_unit_than_microseconds_is_refused(
    client: StreamhouseClient, mistake: int
) -> None:
    with pytest.raises(InvalidRequestError, match="is no time in microseconds since 1970"):
        client.offsets_for_timestamp(TABLE, mistake)


@pytest.mark.parametrize("mistake", [1, NOW_S, NOW_S * 1_000, NOW_S * 10**9])
def test_the_service_refuses_the_unit_too(client: StreamhouseClient, mistake: int) -> None:
    transport = StorageClient.of(client).transport

    with pytest.raises(InvalidRequestError, match=r"parameter timestamp_us = .* multiply seconds"):
        transport.request_json(
            "GET", f"/v1/tables/{TABLE}/offsets", query={"timestamp_us": str(mistake)}
        )


def test_a_time_may_be_a_datetime_with_a_zone(client: StreamhouseClient) -> None:
    early = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)

    assert client.offsets_for_timestamp(TABLE, early) == client.offsets_for_timestamp(TABLE, 0)
    with client.subscribe(TABLE, start=early) as subscription:
        assert subscription.tables == (TABLE,)
    with pytest.raises(InvalidRequestError, match="has no time zone"):
        client.offsets_for_timestamp(TABLE, early.replace(tzinfo=None))


def test_a_read_as_of_a_time_to_come_is_refused(client: StreamhouseClient) -> None:
    now = datetime.datetime.now(datetime.UTC)
    tomorrow = now + datetime.timedelta(days=1)

    with pytest.raises(InvalidRequestError, match="has not come"):
        client.read(TABLE, asOfTimestamp=tomorrow)
    with pytest.raises(InvalidRequestError, match="has not come"):
        client.query(f"SELECT * FROM {TABLE}", asOfTimestamp=tomorrow)
    # The service's clock may be ahead of this one.
    client.read(TABLE, asOfTimestamp=now + datetime.timedelta(minutes=1))
