"""What Kafka clients send and get, as values: no server, no engine, no I/O.

The Kafka door, `server/kafka/`, serves it. Names are Kafka's own: topic, partition, record, record
batch, producer id, member.
"""
