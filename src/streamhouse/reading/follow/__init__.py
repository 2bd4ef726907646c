"""Streams of a table: where a stream starts, its batches, its positions."""
