"""Running tables. The entry is `manager`, the owner of all tables of one data directory.

From below: `directory/` has the files that list the tables; `open_table` is a single table, `keys/`
adds rows by key; `tiering_desk/`, `transactions/` and `upkeep/` are the work on tables; `_opener`
opens tables. `runtime` is shared by all tables.
"""
