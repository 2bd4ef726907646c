"""Produce: records come in.

`_produce.py` answers requests, `_decoding.py` turns records into rows, and `_produced.py` stores
the rows.
"""
