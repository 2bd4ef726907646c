"""Produce: records come in.

`produce.py` answers it, `decoding.py` makes rows of the records, `produced.py` stores these.
"""
