"""The Kafka door: a second listener of the service, for Kafka clients.

A topic is a table, a partition is a bucket, and offsets are the same. Only a service with
`--kafka-port` imports this package: the extra `kafka` has the libraries.
"""
