"""Moves log ranges into Iceberg, each row once.

A round: claim a table, plan offset ranges, write them as sorted Parquet files (the tasks), commit
them in one Iceberg snapshot that carries the new tiered offsets, tell the service.
"""
