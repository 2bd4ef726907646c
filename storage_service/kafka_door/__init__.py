"""The Kafka door: a second listener of the service, for Kafka clients.

A topic is a table, a partition is a bucket, an offset is an offset. Imported only by a service that
was started with `--kafka-port`: the extra `kafka` has its libraries.
"""
