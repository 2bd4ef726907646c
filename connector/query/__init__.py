"""Queries that read only what they need: `streamhouse.sql` and `streamhouse.read`."""
