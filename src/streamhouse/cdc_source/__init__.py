"""A database's tables as primary key tables of the same names: a snapshot, then its changes.

`follower.Follower` is the entry. Debezium reads the database in this process (`debezium_engine`);
the events become rows (`_source_types`, `_change_rows`), committed by whole transactions of the
source (`_target_table`). A table beside the target tables has the progress (`_stream_progress`);
Debezium receives the progress, and is never asked for it.
"""
