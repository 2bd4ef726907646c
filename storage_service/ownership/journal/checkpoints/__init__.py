"""Checkpoints: every file of a data directory at one place of its journal, in the store.

Begin at `_checkpoint.py`, and at `manifest.py` for a checkpoint's content.
"""
