"""Primary key tables: one writer a table, rows by key a bucket, lookups, recovery and mending.

The entries are `key_table.KeyTable`, its `key_writer.KeyWriter`, and `key_lookup`.
"""
