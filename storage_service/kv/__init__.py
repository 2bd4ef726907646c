"""The state of primary key buckets: rows by key, lookups, and the effects of upserts.

Entry points: `kv_tablet.KvTablet`, one bucket; `plan/write_plan.plan_writes` plans changes.
"""
