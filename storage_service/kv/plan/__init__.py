"""What a batch of changes does to a bucket: input, merging, changelog, what to store.

The door is `write_plan.plan_writes`, which takes a list of writes; one write is a list of one.
"""
