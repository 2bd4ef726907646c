"""What all parts know of lake tables.

- `facts`: names of properties and columns, the snapshots a lake is at, the catalog it is in
- `coverage`: which offsets a lake table has, and where its history differs from the log's
- `limits`: which schemas and values a lake table can hold
"""
