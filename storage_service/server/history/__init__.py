"""A table over log and lake: the readable offsets, and the search for an offset by time.

`since_time.py` finds the first row of a time or later. All callers use `Service.first_since`.
"""
