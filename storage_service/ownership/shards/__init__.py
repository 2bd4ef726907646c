"""Several data directories as one service: which shard has which table; begin at `directory.py`.

Decision 0021 (docs/decisions) says how names, ids and shards are kept in the store.
"""
