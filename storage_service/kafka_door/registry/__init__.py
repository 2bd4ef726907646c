"""The schema registry for Kafka's Avro serializers, below `/kafka/registry`.

`registry_door.py` reads requests; `_schema_desk.py` answers from the tables' schemas.
"""
