"""The journal of one data directory in an object store; begin at `operations.py`.

Decision 0020 (docs/decisions) says what is journalled, in which order, and who may write.
"""
