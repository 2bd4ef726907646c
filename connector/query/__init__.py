"""Queries that read only what they need: `streamhouse.sql`, `streamhouse.read`, `client.query`."""
