"""The public clients: `StreamhouseClient` and `AsyncStreamhouseClient`."""
