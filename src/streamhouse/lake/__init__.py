"""Everything that knows Iceberg's library; nothing outside imports it.

The doors: `lake_tables.IcebergLake` for who writes (a round, maintenance), `opened_table` for who
reads, `guards` for commits of others through the REST catalog. Every change of a lake table goes
through `landing.land`. What executors load of `files` imports no pyiceberg.
"""
