"""Queries that read only the needed rows: `streamhouse.sql`, `streamhouse.read`, `client.query`."""
