"""Writes: rows on their way to tables, producers, transactions, rejected rows."""
