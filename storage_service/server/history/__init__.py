"""A table over log and lake: which offsets are readable, and which belong to a time.

`since_time.py` is the one answer to "which row is the first of a time or later". Everybody asks it
through `Service.first_since`.
"""
