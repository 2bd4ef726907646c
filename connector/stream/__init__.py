"""Readers of streams: start positions, the ranges of micro-batches, and checkpoints."""
