"""Bytes between client and service: Arrow IPC bodies and their limits."""
