"""A database's tables as primary key tables of the same names: a snapshot, then its changes.

`follower.Follower` is the door. Debezium reads the database in this process (`debezium_engine`);
what it read becomes rows here (`source_types`, `change_rows`) and is committed by whole
transactions of the source (`target_tables`). How far that is lies beside the tables
(`progress`); Debezium is told, and never asked.
"""
