"""Copies a topic from one Kafka cluster to another until it is stopped: the first step of a move.

    python examples/mirror_topic.py old.example:9092 clicks lake.example:9092

Partitions, keys, timestamps and headers stay as they are. It goes on where it was after a crash,
and may then repeat what it copied last; a table with a primary key is none the worse for it.
"""

from __future__ import annotations

import signal
import sys

from confluent_kafka import Consumer, Producer

source, topic, target = sys.argv[1:]
is_stopped = False


def stop(*_: object) -> None:
    """Copy what was read, and end."""
    global is_stopped
    is_stopped = True


def copied(error: object, _: object) -> None:
    """End at the first record that the target refuses: the next start repeats it."""
    if error is not None:
        raise SystemExit(f"a record was not copied: {error}")


signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
consumer = Consumer(
    {
        "bootstrap.servers": source,
        "group.id": f"mirror-{topic}",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
)
producer = Producer({"bootstrap.servers": target, "enable.idempotence": True, "linger.ms": 20})
consumer.subscribe([topic])
while not is_stopped:
    messages = consumer.consume(10_000, 0.5)
    for message in messages:
        if message.error():
            raise SystemExit(message.error())
        producer.produce(
            topic,
            message.value(),
            message.key(),
            partition=message.partition(),
            timestamp=message.timestamp()[1],
            headers=message.headers(),
            on_delivery=copied,
        )
        producer.poll(0)
    producer.flush()
    if messages:
        consumer.commit(asynchronous=False)
        print(f"copied {len(messages)} records of {topic}", flush=True)
consumer.close()
