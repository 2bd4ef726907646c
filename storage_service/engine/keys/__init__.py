"""Primary key tables: one writer a table, rows by key a bucket, lookups, recovery and mending."""
