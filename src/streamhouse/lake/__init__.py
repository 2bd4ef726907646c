"""All code with knowledge of Iceberg's library; no module outside imports the library.

Public: `lake_tables.IcebergLake` for writers (rounds, maintenance), `opened_table` for readers,
`guards` for commits of other engines through the REST catalog. Every change of a lake table goes
through `_landing.land`. The modules of `files` for executors import no pyiceberg.
"""
