"""Facts about lake tables for all parts of the house.

- `facts`: names of properties and columns, the snapshots of a lake, its catalog
- `coverage`: the offsets covered by a lake table, and where its history differs from the log's
- `limits`: the schemas and values that a lake table can hold
"""
