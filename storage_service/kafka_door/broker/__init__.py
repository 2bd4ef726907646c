"""What a broker has between requests: its address, the other brokers, groups, producers, readers.

`broker.py` is all of it; everything else here is a part of it.
"""
