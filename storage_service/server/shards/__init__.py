"""The other shards of the service: where their tables are, requests to them, moves of tables."""
