"""Object stores for a journal: directory or bucket, opened and probed.

Begin at `object_store.py`.
"""
