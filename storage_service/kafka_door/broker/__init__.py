"""State of a broker between requests: address, other brokers, groups, producers, and readers.

`_broker.py` holds all parts; the other modules are the parts.
"""
