"""The storage service: logs behind HTTP, and the contract (model, errors, client) others use.

Imported on every Spark executor, so this package itself imports nothing.
"""
