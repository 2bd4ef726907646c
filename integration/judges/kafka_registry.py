"""Confluent's serializers of Avro against our registry; a program of the environment `kafka`.

Arguments: the Kafka address, the registry's URL, and what comes first: a `schema`, which makes the
topic, or the `topic`, for which a client asks. Says the values that it has read, a line each.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from confluent_kafka import DeserializingConsumer, Producer, SerializingProducer
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer

FIRST: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["a", "b"]}},
    ],
}
SECOND: dict[str, Any] = {
    **FIRST,
    "fields": [*FIRST["fields"], {"name": "amount", "type": "double"}],
}


def main() -> None:
    """Write with two schemas, read all with what the registry gives."""
    brokers, url, comes_first = sys.argv[1:]
    registry = SchemaRegistryClient({"url": url})
    if comes_first == "schema":
        registry.register_schema("orders-value", Schema(json.dumps(FIRST), "AVRO"))
    else:
        found = Producer({"bootstrap.servers": brokers}).list_topics("orders", timeout=30)
        assert found.topics["orders"].error is None, found.topics["orders"].error
    for schema, ids in ((FIRST, range(5)), (SECOND, range(5, 8))):
        producer = SerializingProducer(
            {
                "bootstrap.servers": brokers,
                "enable.idempotence": True,
                "key.serializer": AvroSerializer(registry, '"string"'),
                "value.serializer": AvroSerializer(registry, json.dumps(schema)),
            }
        )
        for number in ids:
            value = {"id": number, "note": None, "kind": "a", "amount": number / 2}
            producer.produce("orders", key=f"k{number}", value=value, on_delivery=_delivered)
        assert producer.flush(30) == 0
    consumer = DeserializingConsumer(
        {
            "bootstrap.servers": brokers,
            "group.id": "readers",
            "auto.offset.reset": "earliest",
            "key.deserializer": AvroDeserializer(registry),
            "value.deserializer": AvroDeserializer(registry),
        }
    )
    consumer.subscribe(["orders"])
    count, give_up = 0, time.monotonic() + 60
    while count < 8 and time.monotonic() < give_up:
        message = consumer.poll(1)
        if message is not None:
            assert message.error() is None, message.error()
            print(json.dumps(message.value()), flush=True)
            count += 1
    consumer.close()


def _delivered(error: object, _: object) -> None:
    assert error is None, error


if __name__ == "__main__":
    main()
