"""Writes: requests, producers, transactions, rejected rows."""
