"""The state of primary key buckets: rows by key, lookups, and what an upsert does to them."""
