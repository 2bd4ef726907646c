"""Records produced over a socket: stored, answered, refused, each partition for itself."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kio.schema.errors import ErrorCode

from streamhouse.core.model.changelog import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE
from streamhouse.core.model.records.record_format import RAW_TOPIC
from streamhouse.core.model.records.record_sequence import SEQUENCE_COUNT
from streamhouse.core.wire.arrow_body import decode_payload
from streamhouse.storage_service.kafka.records.batches import Compression
from tests.support.held_step import around
from tests.support.kafka_batches import produced, records
from tests.support.kafka_records import columns_of
from tests.support.kafka_world import KafkaClient, KafkaWorld, kafka_world

PRODUCE, INIT_PRODUCER_ID = 0, 22
_PRODUCER = 77
_TEXTS = pa.schema([pa.field("value", pa.string())])
_KEYED = pa.schema([pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())])


async def _topic(world: KafkaWorld, name: str = "events", **fields: Any) -> None:
    await world.http.create_table(name, RAW_TOPIC, **fields)


async def _produce(
    client: KafkaClient,
    partitions: Mapping[int, bytes | None],
    *,
    topic: str = "events",
    version: int = 9,
    acks: int = -1,
) -> list[Any]:
    """Produce to partitions of a topic; return what is answered of each."""
    answer = await client.call(PRODUCE, version, **_request(partitions, topic=topic, acks=acks))
    (topic_answer,) = answer.responses
    assert topic_answer.name == topic
    return list(topic_answer.partition_responses)


def _request(
    partitions: Mapping[int, bytes | None], *, topic: str = "events", acks: int = -1
) -> dict[str, Any]:
    data = [{"index": index, "records": batch} for index, batch in partitions.items()]
    return {
        "acks": acks,
        "timeout": timedelta(seconds=10),
        "topic_data": [{"name": topic, "partition_data": data}],
    }


async def _counted(
    client: KafkaClient, values: Sequence[bytes], sequence: int, *, epoch: int = 0, **more: Any
) -> tuple[ErrorCode, int]:
    """Produce a numbered batch to partition 0; return its error and first offset."""
    keys = more.pop("keys", None)
    batch = produced(
        records(values, keys=keys), producer_id=_PRODUCER, epoch=epoch, sequence=sequence
    )
    (answer,) = await _produce(client, {0: batch}, **more)
    return answer.error_code, answer.base_offset


def _rows(world: KafkaWorld, topic: str = "events") -> list[list[dict[str, Any]]]:
    """Return the rows of every bucket's log."""
    (table,) = [t for t in world.service.manager.open_tables() if t.path.table == topic]
    found = []
    for tablet in table.tablets:
        batches = tablet.read(tablet.log_start_offset, bytes_max=1 << 30)
        found.append(
            [
                row
                for batch in batches
                for row in decode_payload(
                    batch.payload, table.log_schema_of(batch.schema_id)
                ).to_pylist()
            ]
        )
    return found


def _values(world: KafkaWorld) -> list[list[Any]]:
    return [[row["value"] for row in rows] for rows in _rows(world)]


async def test_every_version_stores_records_and_says_where(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await _topic(world)
        client = await world.client()

        for number, version in enumerate(range(3, 12)):
            batch = produced(records([b"a", b"b"], keys=[b"k", None]))
            (answer,) = await _produce(client, {0: batch}, version=version)

            assert (answer.error_code, answer.base_offset) == (ErrorCode.none, 2 * number)
        row = _rows(world)[0][0]
        assert (row["key"], row["value"], row["timestamp"].timestamp()) == (b"k", b"a", 0.005)
        assert world.service.metrics.appended_rows._value.get() == 18


async def test_each_partition_is_a_bucket_and_is_answered_for_itself(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await _topic(world, bucket_count=3)
        client = await world.client()
        damaged = bytearray(produced(records([b"x"])))
        damaged[-1] ^= 1
        parts = {
            2: produced(records([b"two"])),
            0: bytes(damaged),
            9: produced(records([b"nowhere"])),
            1: None,
        }

        answers = await _produce(client, parts)

        assert [(a.index, a.error_code, a.base_offset) for a in answers] == [
            (2, ErrorCode.none, 0),
            (0, ErrorCode.corrupt_message, -1),
            (9, ErrorCode.unknown_topic_or_partition, -1),
            (1, ErrorCode.invalid_record, -1),
        ]
        assert _values(world) == [[], [], [b"two"]]
        (answer,) = await _produce(client, {0: parts[2]}, topic="nothing")
        assert answer.error_code is ErrorCode.unknown_topic_or_partition


async def test_a_producer_is_numbered_as_a_broker_numbers_it(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await _topic(world)
        client = await world.client()
        unknown = await _counted(client, [b"?"], 7)
        first = await _counted(client, [b"a", b"b"], 0)
        again = await _counted(client, [b"a", b"b"], 0)
        skipped = await _counted(client, [b"d"], 3)
        second = await _counted(client, [b"c"], 2)
        other = await _counted(client, [b"a"], 0)
        fresh = await _counted(client, [b"e"], 0, epoch=1)
        fenced = await _counted(client, [b"d"], 3)

        assert unknown == (ErrorCode.unknown_producer_id, -1)
        assert (first, again, second) == (
            (ErrorCode.none, 0),
            (ErrorCode.none, 0),
            (ErrorCode.none, 2),
        )
        assert skipped == other == (ErrorCode.out_of_order_sequence_number, -1)
        assert fresh == (ErrorCode.none, 3)
        assert fenced == (ErrorCode.invalid_producer_epoch, -1)
        assert _values(world) == [[b"a", b"b", b"c", b"e"]]


async def test_what_a_producer_stored_is_known_after_a_restart(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await _topic(world)
        client = await world.client()
        assert await _counted(client, [b"a", b"b"], 0) == (ErrorCode.none, 0)

    async with kafka_world(tmp_path) as world:
        client = await world.client()
        assert await _counted(client, [b"a", b"b"], 0) == (ErrorCode.none, 0)
        assert await _counted(client, [b"c"], 2) == (ErrorCode.none, 2)
        assert _values(world) == [[b"a", b"b", b"c"]]


async def test_requests_in_flight_are_stored_in_order_and_share_a_commit(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await _topic(world)
        client = await world.client()
        numbers = [
            client.send(
                PRODUCE,
                9,
                **_request(
                    {
                        0: produced(
                            records([b"%d" % n] * (1 + 400 * (n % 2))),
                            producer_id=_PRODUCER,
                            epoch=0,
                            sequence=sum(1 + 400 * (m % 2) for m in range(n)),
                        )
                    }
                ),
            )
            for n in range(20)
        ]
        answers = [await client.answer(PRODUCE, 9, number) for number in numbers]

        (offsets,) = zip(
            *[(a.responses[0].partition_responses[0].base_offset,) for a in answers], strict=True
        )
        assert list(offsets) == [sum(1 + 400 * (m % 2) for m in range(n)) for n in range(20)]


async def test_rows_of_a_table_with_a_key_go_to_their_buckets_once(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await world.http.create_table("events", _KEYED, bucket_count=3, primary_key=("key",))
        client = await world.client()
        keys = [b"%d" % n for n in range(9)]
        first = await _counted(client, [b"x"] * 9, 0, keys=keys)
        same = await _counted(client, [b"x"] * 9, 9, keys=keys)
        skipped = await _counted(client, [b"z"], 19, keys=[b"1"])
        changed = await _counted(client, [b"y"], 18, keys=[b"1"])

        assert [first, same, changed] == [(ErrorCode.none, -1)] * 3
        assert skipped == (ErrorCode.out_of_order_sequence_number, -1)
        ends = [len(rows) for rows in _rows(world)]
        assert sum(ends) == 11
        assert min(ends) > 0

    async with kafka_world(tmp_path) as world:
        client = await world.client()
        for values, sequence, own in (([b"x"] * 9, 0, keys), ([b"x"] * 9, 9, keys)):
            assert (await _counted(client, values, sequence, keys=own))[0] is ErrorCode.none
        assert await _counted(client, [b"y"], 18, keys=[b"1"]) == (ErrorCode.none, -1)
        assert [len(rows) for rows in _rows(world)] == ends


async def test_a_null_value_deletes_the_row_of_its_key(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await world.http.create_table("events", _KEYED, primary_key=("key",))
        client = await world.client()
        batch = produced(records([b"x", b"y", None], keys=[b"a", b"b", b"a"]))

        (answer,) = await _produce(client, {0: batch})

        assert answer.error_code is ErrorCode.none
        (table,) = world.service.manager.open_tables()
        assert table.row_count == 1


async def test_a_record_that_does_not_fit_refuses_its_batch_and_is_named(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await world.http.create_table("events", _TEXTS, bucket_count=2)
        client = await world.client()
        parts = {0: produced(records([b"good", b"\xff"])), 1: produced(records([b"good"]))}

        wrong, right = await _produce(client, parts)

        assert wrong.error_code is ErrorCode.invalid_record
        assert "1 records do not fit, the first is record 1 of its batch" in wrong.error_message
        assert [e.batch_index for e in wrong.record_errors] == [1]
        assert right.error_code is ErrorCode.none
        assert _values(world) == [[], ["good"]]


async def test_records_that_do_not_fit_are_kept_apart_once(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        properties = {"kafka.on.error": "reject"}
        await world.http.create_table("events", _TEXTS, bucket_count=2, properties=properties)
        client = await world.client()
        await _counted(client, [b"a", b"\xff"], 0)
        assert (await _counted(client, [b"\xfe"], 2))[0] is ErrorCode.none
        assert (await _counted(client, [b"b"], 3))[0] is ErrorCode.none

    async with kafka_world(tmp_path) as world:
        client = await world.client()
        for values, sequence in (([b"a", b"\xff"], 0), ([b"\xfe"], 2), ([b"b"], 3), ([b"c"], 4)):
            assert (await _counted(client, values, sequence))[0] is ErrorCode.none
        assert _values(world) == [["a", "b", "c"], []]
        (kept,) = _rows(world, "events__rejected")
        assert sorted((row["source"], row["source_row"]) for row in kept) == [
            ("kafka partition 0", 0),
            ("kafka partition 0", 1),
        ]


async def test_sequences_that_have_gone_round_are_no_repetition_of_what_was_kept_apart(
    tmp_path: Path,
) -> None:
    properties = {"kafka.on.error": "reject"}
    for ms in (5, 6):
        # A process that knows nothing of producers yet, and has the outcomes of transactions.
        async with kafka_world(tmp_path) as world:
            if ms == 5:
                await world.http.create_table("events", _TEXTS, properties=properties)
            columns = columns_of([b"a", b"\xff"], ms=[ms, ms])
            batch = produced(columns, producer_id=_PRODUCER, epoch=0, sequence=10)
            (answer,) = await _produce(await world.client(), {0: batch})
            assert answer.error_code is ErrorCode.none

            assert _values(world) == [["a"] * (ms - 4)]


async def test_bad_records_may_be_refused_from_one_batch_to_the_next(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        properties = {"kafka.on.error": "reject"}
        await world.http.create_table("events", _TEXTS, properties=properties)
        client = await world.client()
        for sequence, value in enumerate([b"a", b"\xff"]):
            assert (await _counted(client, [value], sequence))[0] is ErrorCode.none

        changed = {"set": {"kafka.on.error": "refuse"}}
        answer = await world.http.call("PATCH", "/v1/tables/events/properties", json_body=changed)
        assert answer.status == 200, answer.body

        assert await _counted(client, [b"b"], 2) == (ErrorCode.none, 1)
        assert await _counted(client, [b"b"], 2) == (ErrorCode.none, 1)
        assert await _counted(client, [b"c"], 3) == (ErrorCode.none, 2)
        assert _values(world) == [["a", "b", "c"]]


async def test_changes_by_key_that_do_not_fit_are_kept_apart(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("key", pa.string(), nullable=False), pa.field("v", pa.string())])
    properties = {"kafka.value.format": "raw", "kafka.on.error": "reject"}
    async with kafka_world(tmp_path) as world:
        await world.http.create_table(
            "events", schema, bucket_count=3, primary_key=("key",), properties=properties
        )
        client = await world.client()
        keys, values = [b"a", b"b", b"c", b"a"], [b"1", b"2", b"\xff", None]
        batch = produced(records(values, keys=keys), producer_id=_PRODUCER, epoch=0, sequence=0)
        for _ in range(2):
            (answer,) = await _produce(client, {1: batch})
            assert answer.error_code is ErrorCode.none

        tables = {table.path.table: table for table in world.service.manager.open_tables()}
        assert (tables["events"].row_count, tables["events__rejected"].row_count) == (1, 1)


async def test_a_client_without_answers_learns_of_an_error_by_the_end(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await _topic(world)
        client = await world.client()
        client.send(PRODUCE, 9, **_request({0: produced(records([b"a"]))}, acks=0))
        (answer,) = await _produce(client, {0: produced(records([b"b"]))}, acks=1)
        assert answer.base_offset == 1

        client.send(PRODUCE, 9, **_request({5: produced(records([b"a"]))}, acks=0))

        assert await client.is_closed()
        assert _values(world) == [[b"a", b"b"]]


@pytest.mark.parametrize(
    ("batch", "code"),
    [
        (produced(records([b"x"]), is_transactional=True), "transactional_id_authorization_failed"),
        (produced(records([b"x"])) * 2, "invalid_record"),
        (produced(records([b"x"]), producer_id=3, epoch=-1, sequence=0), "invalid_record"),
        (produced(records([b"x"]), producer_id=3, epoch=0, sequence=-1), "invalid_record"),
        (produced(records([b"x"]), producer_id=-2, epoch=0, sequence=0), "invalid_record"),
        (b"\0" * 70, "unsupported_for_message_format"),
    ],
)
async def test_what_no_producer_may_send_is_refused_by_name(
    tmp_path: Path, batch: bytes, code: str
) -> None:
    async with kafka_world(tmp_path) as world:
        await _topic(world)
        client = await world.client()

        (answer,) = await _produce(client, {0: batch})

        assert answer.error_code.name == code
        assert _values(world) == [[]]


async def test_sequences_go_round(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        # A table that keeps bad records apart takes a producer in the middle of its numbers.
        await _topic(world, properties={"kafka.on.error": "reject"})
        client = await world.client()
        last = SEQUENCE_COUNT - 1

        assert await _counted(client, [b"a", b"b"], last - 1) == (ErrorCode.none, 0)
        assert await _counted(client, [b"c"], 0) == (ErrorCode.none, 2)
        assert await _counted(client, [b"a", b"b"], last - 1) == (ErrorCode.none, 0)


async def test_unknown_acks_are_refused(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await _topic(world)
        client = await world.client()

        (answer,) = await _produce(client, {0: produced(records([b"a"]))}, acks=2)

        assert answer.error_code is ErrorCode.invalid_required_acks


async def test_every_producer_is_a_new_one_and_none_has_transactions(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        ids = set()
        for version in range(6):
            answer = await client.call(
                INIT_PRODUCER_ID,
                version,
                transactional_id=None,
                transaction_timeout=timedelta(seconds=1),
            )
            assert (answer.error_code, answer.producer_epoch) == (ErrorCode.none, 0)
            ids.add(answer.producer_id)
        assert len(ids) == 6
        assert all(0 <= producer_id < 1 << 63 for producer_id in ids)

        refused = await client.call(
            INIT_PRODUCER_ID, 4, transactional_id="t", transaction_timeout=timedelta(seconds=1)
        )
        assert refused.error_code is ErrorCode.transactional_id_authorization_failed


async def test_what_is_refused_for_now_is_not_overtaken(tmp_path: Path) -> None:
    """After a start nobody knows which batch is the next: the first to come has its place."""
    large = produced(
        records([b"x" * 200_000], keys=[b"1"]),
        producer_id=_PRODUCER,
        epoch=0,
        sequence=30,
        compression=Compression.GZIP,
    )
    most = 1 << 20
    sizes = {"batch_bytes_max": most, "body_bytes_max": most, "bodies_bytes_max": 2 * most}
    async with kafka_world(tmp_path, **sizes) as world:
        await world.http.create_table("events", _KEYED, bucket_count=2, primary_key=("key",))
        client = await world.client()
        with world.service.body_memory.body("another") as held:
            held.end()
            assert held.adds_at_once(2 * most - 100_000)
            (first,) = await _produce(client, {0: large})
            later = await _counted(client, [b"y"], 31, keys=[b"1"])
        (again,) = await _produce(client, {0: large})
        after = await _counted(client, [b"y"], 31, keys=[b"1"])

        assert first.error_code is ErrorCode.request_timed_out
        assert later[0] is ErrorCode.out_of_order_sequence_number
        assert (again.error_code, after[0]) == (ErrorCode.none, ErrorCode.none)
        rows = [row for bucket in _rows(world) for row in bucket]
        assert [row["value"][:1] for row in rows] == [b"x", b"x", b"y"]


async def test_what_was_damaged_on_the_way_is_not_overtaken(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await world.http.create_table("events", _KEYED, bucket_count=2, primary_key=("key",))
        client = await world.client()
        first = records([b"old"], keys=[b"1"])
        damaged = bytearray(produced(first, producer_id=_PRODUCER, epoch=0, sequence=0))
        damaged[-1] ^= 1

        (part,) = await _produce(client, {0: bytes(damaged)})
        assert part.error_code is ErrorCode.corrupt_message
        later = await _counted(client, [b"new"], 1, keys=[b"1"])
        assert later[0] is ErrorCode.not_leader_or_follower

        for number, value in enumerate([b"old", b"new"]):
            assert (await _counted(client, [value], number, keys=[b"1"]))[0] is ErrorCode.none
        rows = [row for bucket in _rows(world) for row in bucket]
        assert [row["value"] for row in rows] == [b"old", b"old", b"new"]


async def test_what_came_before_its_table_is_not_overtaken(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        before = await _counted(client, [b"a"], 0, keys=[b"1"])
        assert before[0] is ErrorCode.unknown_topic_or_partition
        await world.http.create_table("events", _KEYED, bucket_count=2, primary_key=("key",))

        later = await _counted(client, [b"b"], 1, keys=[b"1"])
        assert later[0] is ErrorCode.not_leader_or_follower
        for number in range(2):
            assert (await _counted(client, [b"x"], number, keys=[b"1"]))[0] is ErrorCode.none


async def test_records_that_are_not_even_begun_end_the_connection(tmp_path: Path) -> None:
    async with kafka_world(tmp_path, open_requests_max=1) as world:
        await _topic(world)
        client = await world.client()

        world.service.begin_request("another")
        client.send(PRODUCE, 9, **_request({0: produced(records([b"a"]))}))
        assert await client.is_closed()
        world.service.end_request("another")

        assert await _counted(await world.client(), [b"b"], 0) == (ErrorCode.none, 0)
        assert _values(world) == [[b"b"]]


class PanicException(BaseException):
    """What a library in Rust raises where it has a bug."""


@pytest.mark.parametrize("kind", [RecursionError, PanicException])
@pytest.mark.parametrize("inline_bytes_max", [64 << 10, 1], ids=["inline", "on a thread"])
async def test_records_that_meet_a_bug_refuse_their_partition_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[BaseException],
    inline_bytes_max: int,
) -> None:
    def act(real: Any, columns: Any, *arguments: Any, **more: Any) -> Any:
        if b"poison" in columns.values.to_pylist():
            raise kind("too deep")
        return real(columns, *arguments, **more)

    async with kafka_world(tmp_path, inline_bytes_max=inline_bytes_max) as world:
        await _topic(world, bucket_count=3)
        client = await world.client()
        around(monkeypatch, "records-read", act)
        values = [b"a", b"poison", b"b"]
        parts = await _produce(client, {n: produced(records([v])) for n, v in enumerate(values)})

        refused = ErrorCode.unknown_server_error
        assert [part.error_code for part in parts] == [ErrorCode.none, refused, ErrorCode.none]
        assert "reading the records failed" in parts[1].error_message
        assert _values(world) == [[b"a"], [], [b"b"]]


async def test_what_takes_long_to_decode_is_not_decoded_on_the_event_loop(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await _topic(world, bucket_count=2)
        client = await world.client()
        few = produced(records([b"a"]))
        large_once_unpacked = produced(records([bytes(2 << 20)]), compression=Compression.ZSTD)
        assert len(large_once_unpacked) < 1_000

        def on_threads() -> float:
            return sum(b.get() for b in world.service.metrics.worker_wait_seconds._buckets)

        for batches, handed_over in (
            ([few, few], 0),
            ([large_once_unpacked], 1),
            ([produced(records([b""] * 6_000))] * 2, 2),
        ):
            before = on_threads()
            data = [{"index": i, "records": batch} for i, batch in enumerate(batches)]
            answer = await client.call(
                PRODUCE,
                9,
                acks=-1,
                timeout=timedelta(seconds=10),
                topic_data=[{"name": "events", "partition_data": data}],
            )

            codes = {part.error_code for part in answer.responses[0].partition_responses}
            assert codes == {ErrorCode.none}
            assert on_threads() - before == handed_over


async def test_changes_of_debezium_are_applied_to_a_table_with_a_key(tmp_path: Path) -> None:
    people = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])

    def envelope(op: str, before: Any = None, after: Any = None) -> bytes:
        return json.dumps({"op": op, "before": before, "after": after, "ts_ms": 1}).encode()

    ann, bo, eve = ({"id": n, "name": name} for n, name in enumerate(("Ann", "Bo", "Eve")))
    async with kafka_world(tmp_path) as world:
        properties = {"kafka.value.format": "debezium-json"}
        await world.http.create_table("events", people, primary_key=("id",), properties=properties)
        client = await world.client()
        changes = [
            envelope("r", after=ann),
            envelope("c", after=bo),
            envelope("u", before=ann, after={**ann, "name": "Anna"}),
            envelope("d", before=bo),
            None,
            envelope("c", after=eve),
        ]
        keys = [json.dumps({"id": n}).encode() for n in (0, 1, 0, 1, 1, 2)]
        (stored,) = await _produce(client, {0: produced(records(changes, keys=keys))})
        (refused,) = await _produce(client, {0: produced(records([envelope("t")]))})

        assert stored.error_code is ErrorCode.none
        assert refused.error_code is ErrorCode.invalid_record
        ((*rows,),) = _rows(world)
        assert [(r["__change_type"], r["id"], r["name"]) for r in rows] == [
            (INSERT, 0, "Ann"),
            (INSERT, 1, "Bo"),
            (UPDATE_BEFORE, 0, "Ann"),
            (UPDATE_AFTER, 0, "Anna"),
            (DELETE, 1, "Bo"),
            (INSERT, 2, "Eve"),
        ]


async def test_the_event_loop_reads_no_large_parts_of_a_request_of_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: Counter[bool] = Counter()

    def counted(real: Any, *arguments: Any) -> Any:
        threads[threading.current_thread() is threading.main_thread()] += 1
        return real(*arguments)

    around(monkeypatch, "records-decoding", counted)
    async with kafka_world(tmp_path) as world:
        await _topic(world, bucket_count=64)
        large = produced(records([b"v"] * 1_000))
        answers = await _produce(await world.client(), dict.fromkeys(range(64), large))
        assert {answer.error_code for answer in answers} == {ErrorCode.none}
        assert threads == {False: 64}
