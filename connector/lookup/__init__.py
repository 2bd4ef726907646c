"""The rows of a primary key table looked up for the rows of a DataFrame, in batch and in a stream.

The public functions are `lookup_join.lookup_join` and `lookup_join.register_lookup`. Both plan on
the driver (`_lookup_plan.py`). On executors `_joined_batches.py` joins batches, and `_key_rows.py`
caches keys with their rows (`_key_index.py` is the index, `_row_values.py` takes the values).
`_row_source.py` asks the service for keys outside the cache, or reads the whole table where a full
read is cheaper (`_whole_rows.py`, of a `_table_cut.py`). The tasks of a machine share one full read
(`_shared_tables.py`); after a write only the changes are read.
"""
