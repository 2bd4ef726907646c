"""Many encoded keys at once: runs of bytes, hashes that stand for keys, an index of hashes.

The doors are `key_hash.KeyHasher` and `hash_index.HashIndex`. No knowledge of rows or tables.
"""
