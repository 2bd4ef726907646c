"""The schema registry for Kafka's Avro serializers, below `/kafka/registry`.

`registry_route.py` reads requests, `schema_desk.py` answers them from the tables' schemas.
"""
