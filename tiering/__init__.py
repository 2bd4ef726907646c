"""Moves log ranges into Iceberg, each row once.

A round claims a table, plans offset ranges, and writes the ranges as sorted Parquet files (the
tasks). One Iceberg snapshot commits the files with the new tiered offsets; the service registers
the snapshot.
"""
