"""The values that Kafka clients send and receive: no server, no engine, no I/O.

The Kafka door, `storage_service/kafka_door/`, serves these values. Names are Kafka's own: topic,
partition, record, record batch, producer id, member.
"""
