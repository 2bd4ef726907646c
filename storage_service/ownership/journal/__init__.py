"""The journal of one data directory in an object store; begin at `operations.py`.

Decision 0020 (docs/decisions) has the journalled changes, their order, and the permission to write.
"""
