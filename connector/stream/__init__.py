"""Streams: where one starts, what a micro-batch consists of, what its checkpoint says."""
