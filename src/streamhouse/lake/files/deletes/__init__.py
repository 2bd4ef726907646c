"""Rows that are gone: deletion vectors, and the reading of all deletes."""
