"""Consumer groups of Kafka's classic protocol, as values and decisions without I/O.

Begin at `coordinator.py`. `group.py` is one group; it has the states of Apache Kafka's
GroupCoordinator, and answers each call in each state with the same error codes.
"""
