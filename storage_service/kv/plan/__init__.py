"""What a batch of changes does to a bucket: input, merging, changelog, what to store.

The door is `write_plan.plan_writes`, which takes a list of writes; one write is a list of one.
Behind it are two plans that give the same: `few_rows`, row by row, and `upsert_plan`, by columns.
"""
