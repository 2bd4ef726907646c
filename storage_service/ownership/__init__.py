"""Ownership: journals in an object store, shards of services, and roles of a process."""
