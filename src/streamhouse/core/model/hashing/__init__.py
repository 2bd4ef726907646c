"""Many encoded keys at once: runs of bytes, hashes in place of keys, an index of hashes.

The entries are `key_hash.KeyHasher` and `hash_index.HashIndex`. Rows and tables are unknown here.
"""
