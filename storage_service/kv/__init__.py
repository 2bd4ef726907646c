"""The state of primary key buckets: rows by key, lookups, and what an upsert does to them.

The door is `kv_tablet.KvTablet`, one bucket; `plan/write_plan.plan_writes` plans what changes it.
"""
