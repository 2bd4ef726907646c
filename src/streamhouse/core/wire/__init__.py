"""Bytes between client and service: Arrow IPC bodies and their limits.

The entries are `request_stream.open_request`, which reads any body of rows into `RequestBatch`es,
and `arrow_body` for the bodies of appends and fetches.
"""
