"""The effects of a batch of changes on a bucket: input, merging, changelog, stored rows.

Entry point: `write_plan.plan_writes`, for a list of writes. Two plans with equal results lie
behind: `few_rows`, row by row, and `upsert_plan`, by columns.
"""
