"""A table as Iceberg sees it: schema, field ids, partitioning, and their changes."""
